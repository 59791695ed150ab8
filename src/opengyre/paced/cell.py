"""Cells that keep real protocol and real state, and take their time from a cost model.

    controller ── call, notify ──▶ PacedCell ─┬─ PacedEngine   who says what, how fast
               ◀── chunk ─────────            └─ sum           the ids of the micro-steps in it, and how many

They answer the calls of ``cells/worker.py`` and live in the conductor's own process: nothing is computed, so nothing
needs a process. A gradient sum is a list of what went into it, so the ledger's promise can be checked at every commit.
Calls are answered one after the other, as one thread would.

A cell may be lost, by chance or at given hours (``simulate/faults.py``): its calls and its sum are gone, and the next
one is there after ``restart_s``. All that follows from it is the conductor's own doing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from opengyre.cells.channel import EventHandler
from opengyre.cluster.base import CellSpec
from opengyre.config import RunConfig
from opengyre.errors import CellError, EngineError, TrainingError
from opengyre.paced.engine import PacedEngine
from opengyre.paced.pace import Pace
from opengyre.paced.speech import Speech
from opengyre.rollout.base import GenerateRequest, TokenChunk
from opengyre.rollout.tokens import from_wire
from opengyre.samples.build import unique_tokens
from opengyre.samples.types import Sample
from opengyre.samples.types import from_wire as sample_from_wire
from opengyre.simulate.cost import CostModel
from opengyre.simulate.faults import check_lost_at, moments
from opengyre.training.base import MicroStats, StepStats

STATE_FILE = "state.json"  # what makes a checkpoint whole (training/folders.py)


class PacedCluster:
    """Starts cells in this process. Implements ``cluster.base.Cluster``."""

    def __init__(self, config: RunConfig, pace: Pace, cost: CostModel, speech: Speech) -> None:
        self._config, self._pace, self._cost, self._speech = config, pace, cost, speech
        self._sums: dict[str, list[str]] = {}  # handed over, by key
        self._cells: list[PacedCell] = []
        check_lost_at(config.paced.lost_at_h, dict(config.cells.names()), "paced.lost_at_h")
        self._began = pace.now()
        self._losses: dict[str, Iterator[float]] = {}

    async def start(self, spec: CellSpec, on_event: EventHandler) -> PacedCell:
        """Start a cell; it has no weights yet. One that was lost is back after ``restart_s``."""
        if spec.name in self._losses:
            await self._pace.sleep(self._cost.restart_s)
        else:
            paced = self._config.paced
            self._losses[spec.name] = moments(spec.name, paced.cell_mtbf_h, paced.lost_at_h, self._config.seed)
        cell = PacedCell(spec, on_event, self._config, self._pace, self._cost, self._speech, self._sums)
        now = self._pace.now() - self._began
        cell.lose_at(next((self._began + moment for moment in self._losses[spec.name] if moment > now), None))
        self._cells.append(cell)
        return cell

    async def close(self) -> None:
        """End every cell."""
        for cell in self._cells:
            await cell.stop(0.0)


class PacedCell:
    """One cell. Implements ``cluster.base.CellProcess``."""

    def __init__(
        self,
        spec: CellSpec,
        on_event: EventHandler,
        config: RunConfig,
        pace: Pace,
        cost: CostModel,
        speech: Speech,
        sums: dict[str, list[str]],
    ) -> None:
        self.name, self.pid = spec.name, os.getpid()
        self._on_event, self._pace, self._cost, self._sums = on_event, pace, cost, sums
        self._scale = config.paced.token_scale
        self._rate = config.train.learning_rate
        self._engine = PacedEngine(pace, cost, speech, token_scale=self._scale, send=self._send)
        self._version, self._sum = 0, list[str]()
        self._started = pace.now()
        self._why = "stopped"
        self._end = asyncio.Event()
        self._ended = asyncio.create_task(self._end.wait(), name=f"{self.name} ends")
        self._loss: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._submitting: set[asyncio.Task[None]] = set()

    def lose_at(self, moment: float | None) -> None:
        """Have the cell end at a modelled moment, whatever it is doing; None: it lasts."""
        if moment is not None:
            self._loss = asyncio.create_task(self._lose(moment), name=f"{self.name} loss")

    async def _lose(self, moment: float) -> None:
        await self._pace.until(moment)
        self._why = f"lost after {self._pace.now() - self._started:.0f} s, as told"
        self._engine.close()
        self._end.set()

    async def call(self, op: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        """Answer a call in modelled time; ``timeout_s`` never comes, for a model does not hang. Raises CellError when
        the cell is gone, or ends meanwhile."""
        answer = asyncio.create_task(self._answer(op, args))
        try:
            await asyncio.wait({answer, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise CellError(f"ended during {op}", where=self.name)
            return answer.result()
        finally:
            answer.cancel()

    async def _answer(self, op: str, args: dict[str, Any]) -> Any:
        async with self._turn:
            if self._end.is_set():
                raise CellError(f"is gone; cannot {op}", where=self.name)
            return await getattr(self, f"_{op}")(**args)

    def notify(self, op: str, **args: Any) -> None:
        """Take a call for the engine, or its end."""
        if self._end.is_set():
            return
        if op == "submit":
            request = msgspec.convert(args["request"], GenerateRequest, dec_hook=from_wire, builtin_types=(bytes,))
            task = asyncio.create_task(self._submit(request))
            self._submitting.add(task)
            task.add_done_callback(self._submitting.discard)
        elif op == "abort":
            self._engine.abort(args["call_id"])

    async def wait(self) -> str:
        """Return when the cell was stopped."""
        await self._end.wait()
        return self._why

    async def stop(self, grace_s: float) -> None:
        """End it."""
        if self._loss is not None:
            self._loss.cancel()
        self._engine.close()
        self._end.set()
        await self._ended

    async def _submit(self, request: GenerateRequest) -> None:
        try:
            await self._engine.submit(request)
        except EngineError as error:
            self._on_event("refused", {"call_id": request.call_id, "reason": str(error)})

    def _send(self, call_id: str, chunk: TokenChunk) -> None:
        self._on_event("chunk", {"call_id": call_id, "chunk": msgspec.to_builtins(chunk)})

    # --- rollout

    async def _load(self) -> dict[str, Any]:
        return msgspec.to_builtins(self._engine.load())  # type: ignore[no-any-return]

    async def _preempt(self, export_kv: bool) -> dict[str, int]:
        calls, tokens = self._engine.preempt(export_kv=export_kv)
        return {"calls": calls, "kv_tokens": tokens if export_kv else 0}

    async def _release(self, regions: list[str]) -> None:
        """The engine gives memory up. All of the way to training is here, but for the weights."""
        self._engine.regions -= set(regions)
        self._engine.forget_cache()
        await self._pace.sleep(max(0.0, self._cost.to_train_s - self._cost.pull_s))

    async def _resume(self, regions: list[str]) -> None:
        await self._pace.sleep(max(0.0, self._cost.to_rollout_s - self._cost.pull_s))
        self._engine.regions |= set(regions)

    # --- weights

    async def _pull(self, ref: dict[str, Any], version: int) -> None:
        """Get weights; a serving engine stalls meanwhile, and what it had cached is void."""
        if self._engine.serving:
            self._engine.stall(self._cost.pull_s)
        else:
            await self._pace.sleep(self._cost.pull_s)
        self._version, self._sum = version, []
        self._engine.set_version(version)

    async def _publish(self, key: str) -> dict[str, Any]:
        await self._pace.sleep(self._cost.publish_s)
        self._engine.set_version(self._version)
        return {"key": key}

    # --- training

    async def _micro_step(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        real = [sample_from_wire(s) for s in samples]
        by_execution: dict[str, list[Sample]] = {}
        for sample in real:
            by_execution.setdefault(sample.execution_id, []).append(sample)
        tokens = sum(unique_tokens(own) for own in by_execution.values())
        seconds = self._cost.train_s(self._scale * tokens)
        await self._pace.sleep(seconds)
        self._sum += [s.sample_id for s in real if s.tokens]
        return msgspec.to_builtins(  # type: ignore[no-any-return]
            MicroStats(
                loss_sum=0.0,
                tokens=sum(s.tokens for s in real),
                forward_tokens=tokens,
                clipped=0,
                ratio_sum=float(len(real)),
                ratio_max=1.0,
                trajectories=len(real),
                logprob_gap_sum=0.0,
                seconds=seconds,
            )
        )

    async def _take_gradients(self, key: str) -> dict[str, Any]:
        self._sums[key], self._sum = self._sum, []
        return {"key": key}

    async def _add_gradients(self, ref: dict[str, Any]) -> None:
        await self._pace.sleep(self._cost.hand_over_s)
        self._sum += self._sums.pop(ref["key"])

    async def _drop_gradients(self) -> None:
        self._sum = []

    async def _commit(self, n_executions: int) -> dict[str, Any]:
        """Step. Raises TrainingError if a sample is in the sum twice: the ledger has promised that it is not."""
        if len(set(self._sum)) != len(self._sum):
            raise TrainingError("a sample was counted twice", where=self.name)
        await self._pace.sleep(self._cost.commit_s)
        learned = bool(self._sum) and n_executions > 0
        self._version += learned
        self._sum = []
        stats = StepStats(
            version=self._version,
            grad_norm=float(learned),
            learning_rate=self._rate if learned else 0.0,
            n_executions=n_executions,
            seconds=self._cost.commit_s,
        )
        return msgspec.to_builtins(stats)  # type: ignore[no-any-return]

    async def _save(self, folder: str) -> None:
        """Write what makes a paced run resumable: the version."""
        place = Path(folder)
        beside = place.with_name(f"{place.name}.{os.getpid()}.saving")
        beside.mkdir(parents=True)
        (beside / STATE_FILE).write_bytes(msgspec.json.encode({"version": self._version, "paced": True}))
        beside.rename(place)

    async def _restore(self, folder: str) -> int:
        state = msgspec.json.decode((Path(folder) / STATE_FILE).read_bytes())
        if not state.get("paced"):
            raise TrainingError("is no checkpoint of a paced run", where=folder, right="the run's own --paced setting")
        self._version, self._sum = int(state["version"]), []
        return self._version
