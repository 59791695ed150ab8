"""What all engines behind an HTTP server share: one streamed request per call, typed failures, no silent hang.

    generate ── POST ──▶ server        4xx: RequestRefused     503, 429, anything broken: EngineError
             ◀── SSE ───                                       a line = an event = what was sampled since
    iterator closed ──▶ connection closed, and an explicit abort where the server needs one
    abandon(reason) ──▶ every open response closed: its call gets an EngineError and goes on elsewhere

A subclass says how a request is written, how an event is read, and which server it is for. A prompt may wait long for
its turn, so a silent call is given up late; whether the *server* lives is asked apart from the calls (proxy/pool.py),
which then calls ``abandon``.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, ClassVar, Protocol, TypeVar

import aiohttp
import msgspec

from opengyre.errors import EngineError
from opengyre.rollout.base import EngineLoad, GenerateRequest, RequestRefused, TokenChunk

CONNECT_S = 10.0  # a server that does not accept by then is as good as down
SILENCE_S = 900.0  # a call without a word for as long is taken for lost: servers were seen to park one for ever
ASK_S = 30.0  # SGLang's own health check gives its scheduler 20 s
OVERLOADED = (408, 425, 429)  # the 4xx that pass; every other one says that this request will never do
TOKEN_NEVER = -9999.0  # what vLLM sends for a log-probability it has not, or that is -inf or NaN
DETAIL_CHARS = 300  # of a server's own words in an error


T = TypeVar("T")


class EngineFacts(msgspec.Struct, frozen=True):
    """What a server says of itself; ``context`` and ``version`` are None when it does not. ``notes`` are warnings."""

    model: str
    context: int | None = None
    version: int | None = None
    notes: list[str] = []


class Reader(Protocol):
    """Reads the events of one call."""

    def take(self, event: bytes) -> TokenChunk | None:
        """What an event adds; None if it adds nothing. Raises EngineError when it reports one."""
        ...


class HttpEngine(ABC):
    """A server that samples tokens. Implements ``rollout.base.RolloutEngine``.

    Args:
        name: in the record, as the cell of what is sampled here.
        url: of the server, without a path.
        api_key: sent as a bearer token; None if the server wants none.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, url: str, *, api_key: str | None = None) -> None:
        self.name, self.url = name, url.rstrip("/")
        self.version = 0  # of the weights, as far as known: what the server says, or else what the trainer said last
        self.facts: EngineFacts | None = None
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[str, asyncio.Future[str]] = {}  # per call, done with the reason when it is abandoned
        self._aborts: set[asyncio.Task[None]] = set()

    # -- one per server kind -----------------------------------------------------------------------------------------

    @abstractmethod
    def _request(self, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        """(path, body) of a call."""

    @abstractmethod
    def _reader(self, request: GenerateRequest) -> Reader:
        """A fresh reader of a call's events."""

    @abstractmethod
    async def describe(self) -> EngineFacts:
        """Ask the server what it is; remembers the answer. Raises EngineError when it is not up."""

    @abstractmethod
    async def top_logprobs(self, prompt_ids: list[int], *, temperature: float) -> list[float]:
        """Log-probabilities of the likeliest first tokens after a prompt, falling: what ``check_logprobs`` looks at."""

    @abstractmethod
    async def _current_version(self) -> int | None:
        """The server's weights version, or None if it names none."""

    async def _abort(self, call_id: str) -> None:  # noqa: B027  most servers need none
        """End a call whose connection we have closed, where closing does not do it."""

    # -- RolloutEngine -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a call's tokens; closing the iterator aborts the call. See ``RolloutEngine.generate``."""
        path, body = self._request(request)
        reader, finished = self._reader(request), False
        gone = self._open[request.call_id] = asyncio.get_running_loop().create_future()
        try:
            with self._typed(gone):
                data = msgspec.json.encode(body)  # a prompt is most of it, and comes as JSON already
                ask = self._http.post(f"{self.url}{path}", data=data, headers=_JSON, timeout=_STREAM)
                async with await _unless(gone, ask) as response:
                    gone.add_done_callback(lambda _: response.close())
                    await self._accepted(response)
                    async for event in _events(response.content):
                        chunk = reader.take(event)
                        if chunk is not None:
                            finished = chunk.finish is not None
                            yield chunk
                        if finished:
                            return
            raise EngineError("ended its stream in the middle of a call", where=self._where)
        finally:
            del self._open[request.call_id]
            if not finished:
                task = asyncio.create_task(self._abort_quietly(request.call_id), name=f"abort {request.call_id}")
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def load(self) -> EngineLoad:
        """Is the server alive, and on which weights. Raises EngineError if it does not answer."""
        await self._ask("/health", parse=False)
        version = await self._current_version()
        if version is not None:
            self.version = version
        return EngineLoad(len(self._open), 0, 0, self.version, True)

    async def encode(self, text: str) -> list[int] | None:
        """Token ids by the server's own tokenizer, without special tokens; None if it gives none."""
        try:
            answer = await self._ask("/tokenize", {"prompt": text, "add_special_tokens": False})
        except RequestRefused:
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) else None

    # -- life --------------------------------------------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        """The server is gone or hangs: all calls here end with an EngineError."""
        for gone in self._open.values():
            if not gone.done():
                gone.set_result(reason)

    async def close(self) -> None:
        """Close all connections; aborts under way are finished first."""
        if self._aborts:
            await asyncio.wait(set(self._aborts), timeout=CONNECT_S)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, path: str, body: dict[str, Any] | None = None, *, parse: bool = True) -> Any:
        """A short request. Raises RequestRefused for a 4xx, EngineError for all else."""
        with self._typed():
            ask = (
                self._http.get(f"{self.url}{path}") if body is None else self._http.post(f"{self.url}{path}", json=body)
            )
            async with ask as response:
                await self._accepted(response)
                raw = await response.read()
                return msgspec.json.decode(raw) if parse else None

    async def _serves(self, path: str) -> bool:
        """Is there such a route for POST? Asked with an empty body, which any route refuses."""
        with self._typed():
            async with self._http.post(f"{self.url}{path}", json={}) as response:
                return response.status not in (403, 404, 405)

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0)  # the router's slots are the limit
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=ASK_S)
            )
        return self._session

    @property
    def _where(self) -> str:
        return f"engine {self.name} ({self.url})"

    async def _accepted(self, response: aiohttp.ClientResponse) -> None:
        """Raise what a status other than 200 means."""
        if response.status == 200:
            return
        said = (await response.content.read(4 * DETAIL_CHARS)).decode(errors="replace")[:DETAIL_CHARS]
        never = 400 <= response.status < 500 and response.status not in OVERLOADED
        raise (RequestRefused if never else EngineError)(f"{response.status} {said}".strip(), where=self._where)

    @contextlib.contextmanager
    def _typed(self, gone: asyncio.Future[str] | None = None) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as cause:
            reason = gone.result() if gone is not None and gone.done() else f"{type(cause).__name__}: {cause}"
            raise EngineError(reason, where=self._where) from cause

    async def _abort_quietly(self, call_id: str) -> None:
        with contextlib.suppress(EngineError):  # it has gone, and the call with it
            await self._abort(call_id)


_JSON = {"Content-Type": "application/json"}
_STREAM = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)


async def _unless(gone: asyncio.Future[str], ask: Coroutine[Any, Any, T]) -> T:
    """The answer to ``ask``, or a TimeoutError as soon as ``gone`` is done."""
    asking = asyncio.ensure_future(ask)
    either: set[asyncio.Future[Any]] = {asking, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise TimeoutError
        return asking.result()
    finally:
        asking.cancel()


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Data of server-sent events, up to ``[DONE]``; a line may be of any length."""
    pending: list[bytes] = []
    async for piece in content.iter_any():
        *lines, rest = piece.split(b"\n")
        for line in lines:
            pending.append(line)
            whole = b"".join(pending).strip()
            pending.clear()
            if whole.startswith(b"data:"):
                data = whole[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
        if rest:
            pending.append(rest)


def parse_version(label: str | int | None) -> int | None:
    """A server's label of its weights as a version; None for one that is no whole number ("default")."""
    text = str(label).strip()
    return int(text) if text.isdecimal() else None


def runs_of(spans: list[tuple[int | None, int]], otherwise: int) -> list[tuple[int, int]]:
    """(version, tokens) runs for the record; labels that are no version count as ``otherwise``."""
    return [(otherwise if version is None else version, tokens) for version, tokens in spans if tokens > 0]


def finite(logprob: float | None) -> float:
    """A log-probability, NaN when the server has none: what is missing is counted, never invented."""
    return float("nan") if logprob is None or logprob <= TOKEN_NEVER else logprob
