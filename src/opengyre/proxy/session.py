"""Proxy sessions: one per execution, known by its URL prefix and its own key, never by content.

Opened before the harness starts, closed at its end or deadline (later calls are refused), forgotten when its samples
are made. Pins, set when it is opened, win over whatever the harness asks.
"""

from __future__ import annotations

import hmac
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from opengyre.config import SamplingConfig
from opengyre.errors import ConfigError
from opengyre.proxy.history import History
from opengyre.proxy.lines import Lines
from opengyre.proxy.refusals import Refusal
from opengyre.record.call import CommittedCall
from opengyre.record.tree import Tree

if TYPE_CHECKING:
    from opengyre.proxy.calls import LiveCall

_NAME = re.compile(r"[A-Za-z0-9._~-]+")  # what a path segment carries unescaped


class CallStore(Protocol):
    """Where calls become durable (``record.store.Store``)."""

    def begin_execution(self, execution_id: str, meta: dict[str, Any]) -> None:
        """Make an execution known."""
        ...

    def submit(self, execution_id: str, call: CommittedCall, messages: Any | None = None) -> Future[None]:
        """Store a call; the future is done when it is durable."""
        ...


class State(Enum):
    """``OPEN`` takes calls; ``CLOSED`` refuses them."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass
class Counters:
    """What a session counts; summed over sessions for the report."""

    calls: int = 0  # answered, whole or cut
    refused: int = 0  # answered with an error
    moves: int = 0  # continuations at another engine
    undelivered: int = 0  # the harness had gone
    joined: int = 0  # re-sends that joined a running call or got its reply again
    truncated: int = 0  # cut by max_tokens or the context
    malformed_calls: int = 0  # tool calls that stayed text
    token_id_gap: int = 0  # chunks whose ids and log-probabilities differ in number
    logprob_gap: int = 0  # chunks with a log-probability that is not finite
    placeholders: int = 0  # images and documents shown to the policy as a placeholder


class HoldClock:
    """Seconds during which at least one of a session's requests waited for a cell."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._total, self._held, self._since = clock, 0.0, 0, 0.0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Time a wait; overlapping waits count once."""
        if not self._held:
            self._since = self._clock()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self._total += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """So far, a wait still going on included."""
        return self._total + (self._clock() - self._since if self._held else 0.0)


@dataclass(eq=False)
class Session:
    """One execution at the door. ``live`` and ``lost`` belong to the call driver."""

    execution_id: str
    key: str
    pins: SamplingConfig
    max_calls: int
    held: HoldClock
    tree: Tree = field(default_factory=Tree)
    history: History = field(init=False)
    counters: Counters = field(default_factory=Counters)
    state: State = State.OPEN
    started: int = 0  # calls let in
    live: dict[bytes, LiveCall] = field(default_factory=dict)
    lost: dict[bytes, LiveCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.history = History(self.tree)

    def resume(self, tree: Tree, history: History) -> None:
        """Go on with what was recorded."""
        self.tree, self.history = tree, history
        self.started = self.counters.calls = len(tree.calls())

    @property
    def closed(self) -> bool:
        """True when no further call is let in."""
        return self.state is State.CLOSED

    def check_open(self) -> None:
        """Raises Refusal (409) when closed."""
        if self.closed:
            raise Refusal("this execution has ended", status=409)

    async def settled(self) -> None:
        """Wait until no call runs; when the session is closed its tree is final then."""
        while self.live:
            await next(iter(self.live.values())).wait()

    def admit(self) -> None:
        """Count a call in. Raises Refusal: 409 when closed, 403 when its calls are used up."""
        self.check_open()
        if self.started >= self.max_calls:
            raise Refusal(f"all {self.max_calls} model calls are used up", status=403, kind="permission_error")
        self.started += 1


class Sessions:
    """All sessions of a run. Everything a session holds is freed by ``forget``.

    Args:
        store: where executions and calls are kept.
        max_calls: model calls per execution.
        clock: seconds, monotonic.
    """

    def __init__(self, store: CallStore, *, max_calls: int = 1000, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self.base_url = ""  # of the server, set when it has its port
        self.lines = Lines()
        self._max_calls, self._clock = max_calls, clock
        self._sessions: dict[str, Session] = {}
        self._on_end: list[Callable[[Session], None]] = []
        self._past = Counters()

    def open(
        self, execution_id: str, *, pins: SamplingConfig | Mapping[str, Any], meta: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Let an execution's calls in. Returns (base_url, key) for the harness.

        Raises:
            ConfigError: pins that cannot be trained with, an id that is no path segment, or a session open already.
            RecordError: the store knows the execution already, or cannot be written.
        """
        if not _NAME.fullmatch(execution_id):
            raise ConfigError(f"{execution_id!r}", where="execution id", right="letters, digits, . _ ~ -")
        if execution_id in self._sessions:
            raise ConfigError("has a session already", where=f"execution {execution_id}")
        pins = check_pins(pins)
        self.store.begin_execution(execution_id, dict(meta))
        session = Session(
            execution_id, secrets.token_urlsafe(24), pins, max_calls=self._max_calls, held=HoldClock(self._clock)
        )
        self._sessions[execution_id] = session
        return f"{self.base_url}/x/{execution_id}", session.key

    def close(self, execution_id: str) -> None:
        """Refuse further calls (409) and end the running ones. Idempotent."""
        session = self.get(execution_id)
        if session.state is State.OPEN:
            session.state = State.CLOSED
            self.lines.forget(execution_id)
            for ended in self._on_end:
                ended(session)

    def forget(self, execution_id: str) -> None:
        """Close and free everything; unknown ids are fine."""
        if execution_id in self._sessions:
            self.close(execution_id)
            past, gone = self._past, self._sessions.pop(execution_id).counters
            for name in vars(past):
                setattr(past, name, getattr(past, name) + getattr(gone, name))

    def get(self, execution_id: str) -> Session:
        """An open or closed session. Raises KeyError when there is none."""
        return self._sessions[execution_id]

    def held_s(self, execution_id: str) -> float:
        """Seconds during which we held a request of this execution with no cell serving it."""
        return self.get(execution_id).held.seconds

    def calls(self, execution_id: str) -> int:
        """Model calls answered."""
        return self.get(execution_id).counters.calls

    @property
    def counters(self) -> Counters:
        """Sums over all sessions, forgotten ones included."""
        rows = [self._past, *(s.counters for s in self._sessions.values())]
        return Counters(**{name: sum(getattr(row, name) for row in rows) for name in vars(self._past)})

    def authorise(self, execution_id: str, keys: list[str]) -> Session:
        """The session of a path prefix, if one of the request's keys is its own.

        Raises Refusal: 404 for an unknown prefix, 401 for a missing or foreign key.
        """
        session = self._sessions.get(execution_id)
        if session is None:
            raise Refusal("no such execution", status=404, kind="not_found_error")
        if not any(hmac.compare_digest(key.encode(), session.key.encode()) for key in keys):
            raise Refusal("invalid key for this execution", status=401, kind="authentication_error")
        return session

    def on_end(self, listener: Callable[[Session], None]) -> None:
        """Call ``listener`` when a session closes."""
        self._on_end.append(listener)

    def __contains__(self, execution_id: object) -> bool:
        return execution_id in self._sessions


def check_pins(pins: SamplingConfig | Mapping[str, Any]) -> SamplingConfig:
    """Pins as they will be used. Raises ConfigError on anything that cannot be sampled or trained with."""
    try:
        # Through plain data even if typed: a struct built in Python was never validated.
        plain = msgspec.to_builtins(pins) if isinstance(pins, SamplingConfig) else dict(pins)
        checked = msgspec.convert(plain, SamplingConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where="pins", right="temperature, top_p, top_k, max_tokens") from None
    if not (math.isfinite(checked.temperature) and checked.temperature > 0):
        raise ConfigError(f"{checked.temperature}", where="pins.temperature", right="a finite number above 0")
    if checked.top_p != 1.0 or checked.top_k != 0:
        raise ConfigError(
            f"top_p={checked.top_p}, top_k={checked.top_k}",
            where="pins",
            right="1.0 and 0: a truncated distribution has no usable behaviour log-probability",
        )
    if checked.max_tokens is not None and checked.max_tokens < 1:
        raise ConfigError(f"{checked.max_tokens}", where="pins.max_tokens", right="at least 1")
    return checked
