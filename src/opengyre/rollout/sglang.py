"""SGLang as a rollout engine: ``/generate``, token ids in, token ids and log-probabilities out.

Measured against SGLang 0.5.23. What its wire asks of a client:

- Streamed events repeat everything sampled so far unless the server runs with ``--incremental-streaming-output``; both
  are read here. ``completion_tokens`` says which is which, and an abort's last event may repeat a token.
- A closed connection frees the request after 2 s only, so an abort is sent too. Aborts match ids by their beginning;
  call ids are of fixed width.
- ``weight_version`` in an event is the server's at that moment; the last event's ``weight_versions`` say which tokens
  each version sampled.
- Log-probabilities are those after temperature, unless the server runs with ``SGLANG_RETURN_ORIGINAL_LOGPROB``.
- KV in the storage tier is not told apart by weights version; ``extra_key`` does it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from opengyre.errors import EngineError
from opengyre.rollout.base import GenerateRequest, RequestRefused, TokenChunk
from opengyre.rollout.http import EngineFacts, HttpEngine, Reader, finite, parse_version, runs_of
from opengyre.rollout.tokens import as_json

TOP = 20  # likeliest tokens looked at by the check of log-probabilities
REPEATS = "its stream repeats a reply from its start in every event; start it with --incremental-streaming-output"


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: dict[str, Any] | None = None


class SglangEngine(HttpEngine):
    """An SGLang server."""

    kind: ClassVar[str] = "sglang"

    def _request(self, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        return "/generate", {
            "rid": request.call_id,
            "input_ids": as_json(request.prompt_ids),
            "stream": True,
            "return_logprob": True,
            "extra_key": f"weights-{self.version}",
            "sampling_params": _sampling(request) | {"max_new_tokens": request.max_new_tokens},
        }

    def _reader(self, request: GenerateRequest) -> Reader:
        return _SglangReader(self)

    async def _abort(self, call_id: str) -> None:
        await self._ask("/abort_request", {"rid": call_id}, parse=False)

    async def describe(self) -> EngineFacts:
        """``/model_info`` and ``/server_info``."""
        model, server = await self._ask("/model_info"), await self._ask("/server_info")
        notes = [] if server.get("incremental_streaming_output") else [REPEATS]
        listed = await self._ask("/v1/models")
        context = next((m.get("max_model_len") for m in listed.get("data", [])), None)
        version = parse_version(model.get("weight_version"))
        self.version = self.version if version is None else version
        self.facts = EngineFacts(str(model.get("model_path", "")), context, version, notes)
        return self.facts

    async def _current_version(self) -> int | None:
        return parse_version((await self._ask("/model_info")).get("weight_version"))

    async def top_logprobs(self, prompt_ids: list[int], *, temperature: float) -> list[float]:
        """See ``HttpEngine.top_logprobs``."""
        body = {
            "input_ids": prompt_ids,
            "return_logprob": True,
            "top_logprobs_num": TOP,
            "sampling_params": _UNTOUCHED | {"temperature": temperature, "max_new_tokens": 1},
        }
        answer = await self._ask("/generate", body)
        return sorted((row[0] for row in answer["meta_info"]["output_top_logprobs"][0]), reverse=True)


# Said in full: a server's preferred parameters would hold for whatever is left out, and bend the distribution.
_UNTOUCHED: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


def _sampling(request: GenerateRequest) -> dict[str, Any]:
    asked = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
        "stop_token_ids": request.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    return _UNTOUCHED | asked | ({} if request.seed is None else {"sampling_seed": request.seed})


class _SglangReader:
    """Reads one call's events, cumulative or incremental."""

    def __init__(self, engine: SglangEngine) -> None:
        self._engine, self._seen = engine, 0
        self._decoder = msgspec.json.Decoder(_Event)

    def take(self, event: bytes) -> TokenChunk | None:
        """What an event adds to what was seen."""
        read = self._decoder.decode(event)
        if read.error is not None or read.meta_info is None:
            raise self._error(read.error or {})
        meta = read.meta_info
        total = max(meta.completion_tokens, self._seen) or len(read.output_ids)
        ids = _new(read.output_ids, total, self._seen)
        scored = _new(meta.output_token_logprobs, total, self._seen)
        logprobs = [finite(logprob) for logprob, *_ in scored]
        if [token for _, token, _ in scored] != ids:
            logprobs = []  # of another token is none; the recorder counts what has not as many as ids
        if self._seen + len(ids) < total:
            logprobs = [float("nan")] * (total - self._seen)  # ids were lost: likewise, and the call is not trained
        self._seen = max(total, self._seen + len(ids))
        finish = self._finish(meta.finish_reason)
        version = parse_version(meta.weight_version)
        if version is None:
            version = self._engine.version
        if not (ids or logprobs or finish):
            return None
        return TokenChunk(
            ids,
            logprobs,
            version,
            finish,
            cached_tokens=meta.cached_tokens,
            versions=self._versions(meta.weight_versions),
        )

    def _versions(self, spans: list[_Span] | None) -> list[tuple[int, int]] | None:
        named = [(parse_version(span.version), span.end - span.start) for span in spans or []]
        if sum(tokens for _, tokens in named) != self._seen:
            return None  # they do not speak of these tokens
        return runs_of(named, self._engine.version)

    def _finish(self, reason: dict[str, Any] | None) -> str | None:
        if reason is None:
            return None
        kind = reason.get("type")
        if kind in ("stop", "length"):
            return str(kind)
        if reason.get("status_code") is not None and not self._seen:
            raise self._error({"code": reason["status_code"], "message": reason.get("message")})
        return "aborted"

    def _error(self, error: dict[str, Any]) -> EngineError:
        kind = RequestRefused if error.get("code") == 400 else EngineError
        return kind(str(error.get("message") or "sent an event that says nothing"), where=f"engine {self._engine.name}")


def _new(items: list[Any], total: int, seen: int) -> list[Any]:
    """What is new in an event when ``seen`` of ``total`` were known: of all so far, or of an increment.

    A list of all so far may already be longer than ``total``: it goes on growing until the event is written.
    """
    if len(items) >= total:
        return items[seen:]
    return items[len(items) - (total - seen) :] if total - seen <= len(items) else items
