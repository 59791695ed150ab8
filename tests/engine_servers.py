"""Stand-ins for an SGLang 0.5.23 and a vLLM 0.32.0 server: their wire as measured, a script in place of a model.

What they share is in ``EngineServer``: what will be said, what goes wrong, what was asked. Real HTTP on a real port; a
server that died can come back on the same one.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

LOGITS = {0: 2.0, 1: 0.0, 2: -1.0}  # of the first token, all that the check of log-probabilities looks at


def logprob(position: int) -> float:
    """Of a reply's token at ``position``: different for neighbours, so that shifts are seen."""
    return -((position % 7) + 1) / 8


class EngineServer:
    """One server.

    Args:
        say: prompt ids -> what is sampled after them, the stop token included.

    Attributes:
        gate: each token waits for it.
        die_after: drop every connection after so many tokens of a call; ``deaths`` counts them.
        status: answer calls with this status.
        encode: its tokenizer; None: it has none.
        raw: log-probabilities before temperature.
        deaf: calls are not even answered with a status before the gate opens.
        versions: labels of the weights: the present one last.
        on_token: told (tokens of the call so far) after each.
    """

    owner = ""

    def __init__(self, say: Callable[[list[int]], Sequence[int]], *, context: int = 100_000) -> None:
        self.say, self.context = say, context
        self.gate = asyncio.Event()
        self.gate.set()
        self.die_after: int | None = None
        self.deaths = 0
        self.status: int | None = None
        self.encode: Callable[[str], list[int]] | None = None
        self.raw = self.deaf = False
        self.version = "0"
        self.events_per_token = 1
        self.requests: list[dict[str, Any]] = []
        self.running: dict[str, asyncio.Event] = {}
        self.ended: list[str] = []
        self.on_token: Callable[[int], None] = lambda n: None
        self.sampled = asyncio.Condition()
        self.tokens = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        common = [web.get("/health", self._health), web.get("/v1/models", self._models)]
        app.add_routes([*self.routes(), *common, web.post("/tokenize", self._tokenize)])
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Die: every connection breaks."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def until_sampled(self, tokens: int) -> None:
        async with self.sampled:
            await self.sampled.wait_for(lambda: self.tokens >= tokens)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status or 200)

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": self.owner, "max_model_len": self.context}
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.encode is None:
            return web.json_response({"error": {"message": "no tokenizer"}}, status=400)
        assert body["add_special_tokens"] is False
        return web.json_response({"tokens": self.encode(body["prompt"]), "count": 1, "max_model_len": 1})

    def top(self, temperature: float) -> list[tuple[int, float]]:
        """The likeliest tokens and their log-probabilities."""
        scale = 1.0 if self.raw else temperature
        total = math.log(sum(math.exp(v / scale) for v in LOGITS.values()))
        return [(token, v / scale - total) for token, v in LOGITS.items()]

    async def tokens_of(self, call: str, prompt: list[int], limit: int) -> AsyncIterator[tuple[int, str | None]]:
        """(token, how it ends) one by one; ends early with token -1 when aborted."""
        ids = list(self.say(prompt))
        finish = "stop" if len(ids) <= limit else "length"
        ids, abort = ids[:limit], asyncio.Event()
        self.running[call] = abort
        try:
            for n, token in enumerate(ids):
                if self.die_after is not None and n >= self.die_after:
                    self.deaths += 1
                    raise ConnectionResetError
                await asyncio.wait(
                    {asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(abort.wait())},
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if abort.is_set():
                    yield -1, "abort"
                    return
                yield token, finish if n + 1 == len(ids) else None
                self.on_token(n + 1)
                async with self.sampled:
                    self.tokens += 1
                    self.sampled.notify_all()
                await asyncio.sleep(0)
        finally:
            self.running.pop(call, None)
            self.ended.append(call)

    @asynccontextmanager
    async def stream(self, request: web.Request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: Any) -> None:
            await response.write(b"data: " + (json.dumps(event).encode() if event != "[DONE]" else b"[DONE]") + b"\n\n")

        try:
            yield send, response
        except ConnectionResetError:
            if request.transport is not None:
                request.transport.abort()


class SglangServer(EngineServer):
    """``incremental``: as with --incremental-streaming-output; ``skew``: log-probabilities that an event lacks;
    ``coalesce``: events say fewer ``completion_tokens`` than they hold, as a list that grew before it was written."""

    owner = "sglang"

    def __init__(self, say: Callable[[list[int]], Sequence[int]], *, incremental: bool = True, **options: Any) -> None:
        super().__init__(say, **options)
        self.incremental, self.skew, self.coalesce, self.lose = incremental, 0, False, 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.get("/model_info", self._model_info),
            web.get("/server_info", self._server_info),
        ]

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "/models/m", "weight_version": self.version, "is_generation": True})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "incremental_streaming_output": self.incremental})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        for call, abort in list(self.running.items()):
            if call.startswith(rid):
                abort.set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.deaf:
            await self.gate.wait()
        if self.status is not None:
            return web.json_response({"error": {"message": "busy"}}, status=self.status)
        sampling = body["sampling_params"]
        if not body.get("stream"):
            top = [[value, token, None] for token, value in self.top(sampling["temperature"])]
            return web.json_response({"output_ids": [0], "meta_info": {"output_top_logprobs": [top]}})
        async with self.stream(request) as (send, response):
            if len(body["input_ids"]) >= self.context:
                said = {"message": "too long", "type": "invalid_request_error", "code": 400, "retryable": False}
                await send({"error": said})
            else:
                await self._events(body, sampling["max_new_tokens"], send)
            await send("[DONE]")
        return response

    async def _events(self, body: dict[str, Any], limit: int, send: Any) -> None:
        ids: list[int] = []
        scored: list[list[Any]] = []
        spans: list[dict[str, Any]] = []
        rid, first = body["rid"], True
        async for token, finish in self.tokens_of(rid, body["input_ids"], limit):
            if token >= 0:
                scored.append([logprob(len(ids)), token, None])
                ids.append(token)
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": len(ids) - 1, "end": len(ids)})
                spans[-1]["end"] = len(ids)
            if self.lose and len(ids) == self.lose and finish is None:
                continue
            total = len(ids)
            meta: dict[str, Any] = {"id": rid, "finish_reason": None, "weight_version": self.version}
            meta |= {"completion_tokens": total - (self.coalesce and finish is None and total > 1), "cached_tokens": 4}
            if finish is not None:
                reason = {"stop": {"type": "stop", "matched": token}, "length": {"type": "length", "length": limit}}
                meta["finish_reason"] = reason.get(finish, {"type": "abort", "message": "Abort before prefill"})
                meta["weight_versions"] = spans
            whole = not self.incremental or first
            shown, values = (ids, scored) if whole else (ids[-1:], scored[-1:])
            if finish == "abort" and self.incremental:
                shown, values = ids[-1:], scored  # an abort repeats the last token beside all log-probabilities
            meta["output_token_logprobs"] = values[: len(values) - self.skew]
            first = False
            await send({"text": "", "output_ids": shown, "meta_info": meta})


class VllmServer(EngineServer):
    """``scale_out``: with /inference/v1/generate; ``dev``: with /weight_info; ``skew``: as for SGLang."""

    owner = "vllm"

    def __init__(
        self, say: Callable[[list[int]], Sequence[int]], *, scale_out: bool = True, dev: bool = True, **options: Any
    ) -> None:
        super().__init__(say, **options)
        self.scale_out, self.dev, self.skew, self.sentinel_at = scale_out, dev, 0, -1

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/inference/v1/generate", self._tokens),
            web.post("/v1/completions", self._completions),
            web.get("/weight_info", self._weight_info),
        ]

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version}) if self.dev else web.Response(status=404)

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return web.json_response({"error": "disabled"}, status=403)
        body = await request.json()
        if not body.get("token_ids"):
            return _bad("token_ids: too short")
        return await self._answer(request, body, body["token_ids"], body["sampling_params"], self._token_choice)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body["prompt"], body, self._text_choice)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], sampling: dict[str, Any], choice: Any
    ) -> web.StreamResponse:
        self.requests.append(body)
        if self.deaf:
            await self.gate.wait()
        if self.status is not None:
            return web.json_response({"error": {"message": "busy", "code": self.status}}, status=self.status)
        if not 0 < sampling["temperature"] <= 2:
            return _bad("temperature must be in [0, 2]")
        if len(prompt) > self.context:
            return _bad(f"maximum context length is {self.context}")
        if not body.get("stream"):
            return web.json_response({"choices": [self._top_choice(choice, sampling["temperature"])]})
        async with self.stream(request) as (send, response):
            n, spans = 0, list[dict[str, Any]]()
            async for token, finish in self.tokens_of(body["request_id"], prompt, sampling["max_tokens"]):
                ids = [token] if token >= 0 else []
                if ids and (not spans or spans[-1]["version"] != self.version):
                    spans.append({"version": self.version, "start": n, "end": n})
                n += len(ids)
                if spans:
                    spans[-1]["end"] = n
                await send({"choices": [choice(ids, n - 1, finish, spans)], "usage": None})
            await send("[DONE]")
        return response

    def _value(self, position: int) -> float:
        return -9999.0 if position == self.sentinel_at else logprob(position)

    def _token_choice(self, ids: list[int], at: int, finish: str | None, spans: list[Any]) -> dict[str, Any]:
        content = [{"token_id": i, "logprob": self._value(at), "rank": 1, "top_logprobs": []} for i in ids]
        said = {"content": content[: len(content) - self.skew]}
        versions = spans if finish else None
        return {"index": 0, "finish_reason": finish, "token_ids": ids, "logprobs": said, "weight_versions": versions}

    def _text_choice(self, ids: list[int], at: int, finish: str | None, spans: list[Any]) -> dict[str, Any]:
        values = [self._value(at) for _ in ids]
        said = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": values[: len(values) - self.skew]}
        return {"index": 0, "text": "", "finish_reason": finish, "token_ids": ids, "logprobs": said}

    def _top_choice(self, choice: Any, temperature: float) -> dict[str, Any]:
        if choice == self._text_choice:
            return {"logprobs": {"top_logprobs": [{f"token_id:{t}": v for t, v in self.top(temperature)}]}}
        rows = [{"token_id": t, "logprob": v, "rank": 1} for t, v in self.top(temperature)]
        return {"logprobs": {"content": [{**rows[0], "top_logprobs": rows}]}}


def _bad(what: str) -> web.Response:
    return web.json_response({"error": {"message": what, "type": "BadRequestError", "code": 400}}, status=400)
