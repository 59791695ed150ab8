"""An engine that says what a program says, in the time that a real one would take.

    submit ─▶ waiting ─ prefill (stops decoding) ─▶ batch ─ a stretch of decode steps for every call at once ─▶ chunks
                                                      │ preempt, abort, or the reply's end
                                                      ▼
                                               what was said so far stays

One task advances the batch; it wakes at a submission and sleeps when nobody is served. A stretch takes ``TICK_S`` of
ours, so that a thousand calls cost little. A cached prefix is one that this engine computed on these weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from opengyre.errors import EngineError
from opengyre.paced.pace import Pace
from opengyre.paced.speech import Speech
from opengyre.rollout.base import REGIONS, EngineLoad, GenerateRequest, TokenChunk
from opengyre.simulate.cost import CostModel

TICK_S = 0.05  # of ours between two chunks: harnesses cannot tell, and the proxy has other calls to serve
Send = Callable[[str, TokenChunk], None]


@dataclass(eq=False)
class _Call:
    """A call: what it will say, how much of it is said, and the modelled tokens of prefill it still owes."""

    request: GenerateRequest
    ids: list[int]
    ends: str
    owed: float
    cached: int
    said: int = 0
    told: bool = False

    @property
    def left(self) -> int:
        return len(self.ids) - self.said


class PacedEngine:
    """One cell's engine. It serves when all regions are there and it has weights, like any other.

    Args:
        speech: what is said; shared by all cells, so that a moved call goes on where it was.
        token_scale: tokens that the cost model is told of for each of ours.
        send: takes (call id, chunk).
    """

    def __init__(self, pace: Pace, cost: CostModel, speech: Speech, *, token_scale: float, send: Send) -> None:
        self.regions: set[str] = set()
        self.version = -1
        self._pace, self._cost, self._speech, self._scale, self._send = pace, cost, speech, token_scale, send
        self._calls: dict[str, _Call] = {}
        self._cache: dict[str, int] = {}  # session -> tokens of its history that are cached here
        self._debt_s = 0.0  # modelled seconds that all calls wait: KV that arrives, weights that are pulled
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="paced engine")

    @property
    def serving(self) -> bool:
        """True if it takes calls."""
        return self.regions == set(REGIONS) and self.version >= 0

    async def submit(self, request: GenerateRequest) -> None:
        """Take a call. Raises EngineError when it is not serving."""
        if not self.serving:
            raise EngineError("is not serving")
        ids, ends = await self._speech.reply(request)
        cached = min(self._cache.get(request.session, 0), len(request.prompt_ids))
        if request.kv is not None and request.kv.get("version") == self.version:
            moved = min(int(request.kv["tokens"]), len(request.prompt_ids))
            self._debt_s += self._cost.kv_move_s(self._scale * max(0, moved - cached))
            cached = max(cached, moved)
        owed = self._scale * (len(request.prompt_ids) - cached)
        self._calls[request.call_id] = _Call(request, ids, ends, owed, cached)
        self._wake.set()

    def abort(self, call_id: str) -> None:
        """Forget a call."""
        self._calls.pop(call_id, None)

    def preempt(self, *, export_kv: bool) -> tuple[int, int]:
        """Stop all calls at their last token. Returns (calls, KV tokens that can go elsewhere)."""
        calls, self._calls = self._calls, {}
        tokens = 0
        for call_id, call in calls.items():
            held = len(call.request.prompt_ids) + call.said if not call.owed else 0
            tokens += held
            kv = {"tokens": held, "version": self.version} if export_kv and held else None
            self._send(call_id, TokenChunk([], [], self.version, "preempted", kv=kv))
        return len(calls), tokens

    def stall(self, seconds: float) -> None:
        """Let every call wait for so many modelled seconds."""
        self._debt_s += seconds

    def set_version(self, version: int) -> None:
        """Other weights: nothing that was cached holds, and running calls are prefilled anew."""
        if version == self.version:
            return
        self.version = version
        self._cache.clear()
        for call in self._calls.values():
            call.owed = self._scale * (len(call.request.prompt_ids) + call.said)

    def forget_cache(self) -> None:
        """KV memory was given up."""
        self._cache.clear()

    def load(self) -> EngineLoad:
        """What the router may ask."""
        return EngineLoad(len(self._calls), 0, sum(self._cache.values()), self.version, self.serving)

    def close(self) -> None:
        """End the task."""
        self._task.cancel()

    async def _run(self) -> None:
        due = self._pace.now()
        while True:
            if not self._calls and not self._debt_s:
                self._wake.clear()
                await self._wake.wait()
                due = self._pace.now()
            seconds, steps, calls = self._one_stretch()
            due += seconds
            await self._pace.until(due)
            self._speak(steps, calls)

    def _one_stretch(self) -> tuple[float, int, list[_Call]]:
        """What is computed next: the modelled seconds it takes, decode steps, and the calls with a token in each."""
        seconds, self._debt_s = self._debt_s, 0.0
        for call in self._calls.values():
            seconds += self._cost.prefill_s(call.owed)
            call.owed = 0.0
        calls, steps = list(self._calls.values()), 0
        if calls:
            context = self._scale * sum(len(c.request.prompt_ids) + c.said for c in calls)
            step_s = self._scale * self._cost.decode_step_s(len(calls), context)
            steps = min(max(1, round(TICK_S * self._pace.speed / step_s)), min(c.left for c in calls))
            seconds += steps * step_s
        return seconds, steps, calls

    def _speak(self, steps: int, calls: list[_Call]) -> None:
        for call in calls:
            if self._calls.get(call.request.call_id) is not call or call.owed:
                continue  # stopped, or new weights came in the middle: its KV is computed first
            piece = call.ids[call.said : call.said + steps]
            call.said += len(piece)
            done = not call.left
            if done:
                del self._calls[call.request.call_id]
            self._cache[call.request.session] = len(call.request.prompt_ids) + call.said
            cached = 0 if call.told else call.cached
            call.told = True
            finish = call.ends if done else None
            chunk = TokenChunk(piece, [self._speech.logprob] * len(piece), self.version, finish, cached_tokens=cached)
            self._send(call.request.call_id, chunk)
