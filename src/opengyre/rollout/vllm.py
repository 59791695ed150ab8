"""vLLM as a rollout engine: ``/inference/v1/generate`` where the server has it, else ``/v1/completions``.

Measured against vLLM 0.32.0. What its wire asks of a client:

- ``/inference/v1/generate`` (``--enable-scale-out``) is token-in, token-out and names the weights versions at the end.
  ``/v1/completions`` takes token ids too and returns them with ``return_token_ids``, but names no version: there the
  version is the one the server or the trainer said last.
- Log-probabilities are those *before* temperature unless the server runs with ``--logprobs-mode processed_logprobs``.
- -9999.0 stands for a log-probability that is missing, infinite or not a number.
- A closed connection ends a request within a second.
- The server's generation config would set top-p, top-k and penalties that a request leaves out; so none is.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from opengyre.errors import EngineError
from opengyre.rollout.base import GenerateRequest, RequestRefused, TokenChunk
from opengyre.rollout.http import EngineFacts, HttpEngine, Reader, finite, parse_version, runs_of
from opengyre.rollout.tokens import as_json

TOP = 20  # most log-probabilities a token that a server gives by default
TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
NO_VERSIONS = "names no weights versions on /v1/completions; start it with --enable-scale-out"


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Scored(msgspec.Struct):
    logprob: float | None = None
    token_id: int | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Scored] | None = None  # /inference/v1/generate
    token_logprobs: list[float | None] | None = None  # /v1/completions, with
    tokens: list[str] | None = None  # "token_id:7"


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class VllmEngine(HttpEngine):
    """A vLLM server."""

    kind: ClassVar[str] = "vllm"

    def __init__(self, name: str, url: str, *, api_key: str | None = None) -> None:
        super().__init__(name, url, api_key=api_key)
        self._path = TOKENS
        self._tells_version = True  # until it says that it does not

    def _request(self, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        salt = {"cache_salt": f"weights-{self.version}", "stream": True, "request_id": request.call_id}
        return self._path, self._body(as_json(request.prompt_ids), _sampling(request)) | salt

    def _body(self, prompt_ids: list[int] | msgspec.Raw, sampling: dict[str, Any]) -> dict[str, Any]:
        model = {"model": self.facts.model} if self.facts is not None else {}
        if self._path == TOKENS:
            return {**model, "token_ids": prompt_ids, "sampling_params": sampling}
        exact = {"return_token_ids": True, "add_special_tokens": False, "return_tokens_as_token_ids": True}
        return {**model, "prompt": prompt_ids, **exact, **sampling}

    def _reader(self, request: GenerateRequest) -> Reader:
        return _VllmReader(self)

    async def describe(self) -> EngineFacts:
        """``/v1/models``, and which of the two ways to generate is open."""
        models = (await self._ask("/v1/models")).get("data") or [{}]
        model, notes = models[0], list[str]()
        self._path = TOKENS if await self._serves(TOKENS) else COMPLETIONS
        if self._path == COMPLETIONS:
            notes.append(NO_VERSIONS)
        version = await self._current_version()
        self.version = self.version if version is None else version
        self.facts = EngineFacts(str(model.get("id", "")), model.get("max_model_len"), version, notes)
        return self.facts

    async def _current_version(self) -> int | None:
        if not self._tells_version:
            return None
        try:
            return parse_version((await self._ask("/weight_info")).get("weight_version"))
        except RequestRefused:  # it is a development route
            self._tells_version = False
            return None

    async def top_logprobs(self, prompt_ids: list[int], *, temperature: float) -> list[float]:
        """See ``HttpEngine.top_logprobs``."""
        sampling = _UNTOUCHED | {"temperature": temperature, "max_tokens": 1, "logprobs": TOP}
        answer = await self._ask(self._path, self._body(prompt_ids, sampling))
        said = answer["choices"][0]["logprobs"]
        if self._path == TOKENS:
            found = [row["logprob"] for row in said["content"][0]["top_logprobs"]]
        else:
            found = list(said["top_logprobs"][0].values())
        return sorted(found, reverse=True)


# Said in full: the server's generation config would hold for whatever is left out, and bend the distribution.
_UNTOUCHED: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}


def _sampling(request: GenerateRequest) -> dict[str, Any]:
    asked = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_tokens": request.max_new_tokens,
        "stop_token_ids": request.stop_token_ids,
        "logprobs": 0,  # of the sampled token alone
        "skip_special_tokens": False,
    }
    return _UNTOUCHED | asked | ({} if request.seed is None else {"seed": request.seed})


class _VllmReader:
    """Reads one call's events, of either route."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine, self._seen = engine, 0
        self._decoder = msgspec.json.Decoder(_Event)

    def take(self, event: bytes) -> TokenChunk | None:
        """What an event adds."""
        read = self._decoder.decode(event)
        if read.error is not None:
            raise self._error(read.error)
        if not read.choices:
            return None
        choice = read.choices[0]
        ids, logprobs = choice.token_ids or [], self._logprobs(choice)
        self._seen += len(ids)
        if not (ids or logprobs or choice.finish_reason):
            return None
        finish = choice.finish_reason if choice.finish_reason in (None, "stop", "length") else "aborted"
        return TokenChunk(ids, logprobs, self._engine.version, finish, versions=self._versions(choice.weight_versions))

    def _logprobs(self, choice: _Choice) -> list[float]:
        """One per token; none where the server speaks of other tokens than it sampled."""
        ids, said = choice.token_ids or [], choice.logprobs
        if said is None:
            return []
        if said.content is not None:
            same = [scored.token_id for scored in said.content] == ids
            return [finite(scored.logprob) for scored in said.content] if same else []
        same = said.tokens == [f"token_id:{i}" for i in ids]
        return [finite(logprob) for logprob in said.token_logprobs or []] if same else []

    def _versions(self, spans: list[_Span] | None) -> list[tuple[int, int]] | None:
        named = [(parse_version(span.version), span.end - span.start) for span in spans or []]
        if sum(tokens for _, tokens in named) != self._seen:
            return None  # they do not speak of these tokens
        return runs_of(named, self._engine.version)

    def _error(self, error: Any) -> EngineError:
        code, said = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        kind = RequestRefused if code == 400 else EngineError
        return kind(str(said), where=f"engine {self._engine.name}")
