"""Streaming training across processes equals one process (SPEC §3.8).

    controller ── claims from StepLedger, in random order ──▶ cells a, b, c (satellites), core: processes of their own
         cell:  micro_step … take_gradients ──▶ SharedMemoryTransfer ──▶ core.add_gradients, if the ledger accepts
         core:  commit ──▶ weights ──▶ SharedMemoryTransfer ──▶ cells

Cell b is killed with a local sum nobody has seen; cell c joins in the middle of a step. The equality that must hold:
whatever the order, the flushes and the deaths, the weights after 3 steps are those of one process that goes through the
micro-steps in order. In float64 the only difference is the order of the additions: 1e-11 covers it after three AdamW
steps.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from opengyre.config import TrainConfig
from opengyre.samples.ledger import StepLedger, Verdict
from opengyre.samples.types import Sample, from_wire, to_wire
from opengyre.training.torch_trainer import TorchTrainer
from opengyre.transfer.shared_memory import SharedMemoryTransfer
from training_models import random_samples, tiny_qwen3

STEPS, EXECUTIONS = 3, 8
CONFIG = TrainConfig(learning_rate=1e-2, clip_low=99.0, clip_high=99.0, weight_decay=0.01, micro_step_tokens=64)


def serve(pipe: Connection, run: str, core: bool) -> None:
    """A cell's process: the trainer's methods by name, arrays by reference."""
    torch.set_num_threads(1)
    trainer = TorchTrainer(tiny_qwen3(0), CONFIG, core=core)
    transfer = SharedMemoryTransfer(run, owner=False)
    while True:
        call, *args = pipe.recv()
        result = None
        if call == "micro_step":
            result = trainer.micro_step([from_wire(wire) for wire in args[0]])
        elif call == "take":
            result = transfer.put(args[0], trainer.take_gradients())
        elif call == "add":
            trainer.add_gradients(transfer.get(args[0]))
        elif call == "commit":
            result = trainer.commit(args[0])
        elif call == "publish":
            result = transfer.put(args[0], trainer.weights())
        elif call == "pull":
            trainer.load_weights(transfer.get(args[0]), args[1])
        elif call == "stop":
            return
        pipe.send(result)


class Cell:
    """The controller's end of a cell."""

    def __init__(self, name: str, run: str, *, core: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["training_models", "opengyre.training.torch_trainer"])
        self.name, self.held, self.flushes = name, list[str](), 0
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=serve, args=(end, run, core), daemon=True)
        self.process.start()
        end.close()

    def __call__(self, *call):
        self.pipe.send(call)
        return self.pipe.recv()

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.join()


def micro_steps(step: int) -> list[list[Sample]]:
    """A step's samples, cut without regard to executions."""
    samples = random_samples(step, executions=EXECUTIONS)
    return [samples[i : i + 2] for i in range(0, len(samples), 2)]


def in_order() -> TorchTrainer:
    """The one process to compare with."""
    torch.set_num_threads(1)
    trainer = TorchTrainer(tiny_qwen3(0), CONFIG)
    for step in range(STEPS):
        for micro in micro_steps(step):
            trainer.micro_step(micro)
        trainer.commit(EXECUTIONS)
    return trainer


class Stream:
    """A controller in small: any cell may act at any time."""

    def __init__(self, run: str, seed: int) -> None:
        self.run, self.random, self.now = run, random.Random(seed), 0.0
        self.transfer = SharedMemoryTransfer(run)
        self.core = Cell("core", run, core=True)
        self.cells = [Cell("a", run), Cell("b", run)]

    def step(self, number: int, *, join: bool = False, kill: bool = False) -> StepLedger:
        """One step, from its micro-steps to the weights on every cell."""
        ledger: StepLedger[list[dict]] = StepLedger(number, lease_s=1e9)
        micros = micro_steps(number)
        self.random.shuffle(micros)
        for n, micro in enumerate(micros):
            ledger.add([to_wire(s) for s in micro])
            if n < len(micros) // 2:
                continue
            if kill and n == len(micros) // 2:
                self._kill_with_an_unseen_sum(ledger, "b")
            if join and n == len(micros) // 2:
                self._let_cells_act(ledger, 4)
                self.cells.append(self._newcomer("c"))
            self._let_cells_act(ledger, 1)
        ledger.close()
        while not ledger.complete:
            self._let_cells_act(ledger, 1)
        stats = self.core("commit", EXECUTIONS)
        assert stats.version == number + 1
        self.weights = self.core("publish", f"weights-{stats.version}")
        for cell in self.cells:
            cell("pull", self.weights, stats.version)
        return ledger

    def _let_cells_act(self, ledger: StepLedger, times: int) -> None:
        for _ in range(times):
            cell = self.random.choice([self.core, *self.cells])
            claim = ledger.claim(cell.name, self.now, endless=cell is self.core)
            if claim is not None:
                stats = cell("micro_step", claim.micro)
                assert stats.tokens > 0
                assert ledger.finish_local(cell.name, claim.claim_id)
                cell.held.append(claim.claim_id)
            if cell.held and (cell is self.core or claim is None or self.random.random() < 0.3):
                self._flush(ledger, cell)

    def _flush(self, ledger: StepLedger, cell: Cell) -> None:
        cell.flushes += 1
        if cell is self.core:
            verdict = ledger.push(cell.name, cell.flushes, cell.held, ledger.version)
        else:
            ref = cell("take", f"gradients-{cell.name}-{ledger.version}-{cell.flushes}")
            verdict = ledger.push(cell.name, cell.flushes, cell.held, ledger.version)
            self.core("add", ref)
            self.transfer.drop(ref.key)
        assert verdict is Verdict.ACCEPTED
        cell.held = []

    def _kill_with_an_unseen_sum(self, ledger: StepLedger, name: str) -> None:
        cell = next(c for c in self.cells if c.name == name)
        claim = ledger.claim(cell.name, self.now)
        assert claim is not None
        cell("micro_step", claim.micro)
        ledger.finish_local(cell.name, claim.claim_id)
        second = ledger.claim(cell.name, self.now)
        assert second is not None
        cell.pipe.send(("micro_step", second.micro))  # killed at work
        cell.kill()
        assert ledger.lose(cell.name) >= 2
        self.cells.remove(cell)

    def _newcomer(self, name: str) -> Cell:
        cell = Cell(name, self.run)
        cell("pull", self.weights, 1)
        return cell

    def close(self) -> None:
        """End all cells and remove what the run stored."""
        for cell in [self.core, *self.cells]:
            cell.pipe.send(("stop",))
            cell.process.join()
        self.transfer.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_streaming_equals_one_process(seed):
    stream = Stream(f"streaming-{os.getpid()}-{seed}", seed)
    try:
        ledgers = [stream.step(0), stream.step(1, join=True), stream.step(2, kill=True)]
        final = stream.transfer.get(stream.weights)
    finally:
        stream.close()
    assert ledgers[2].counts.lost >= 2 and all(ledger.counts.pushes > 3 for ledger in ledgers)
    expected = in_order().weights()
    start = TorchTrainer(tiny_qwen3(0), CONFIG, core=False).weights()
    worst = max(float(np.abs(final[name] - weights).max()) for name, weights in expected.items())
    moved = max(float(np.abs(start[name] - weights).max()) for name, weights in expected.items())
    print(f"largest difference {worst:.1e}, while weights moved by {moved:.1e}")
    assert moved > 1e-2 and worst <= 1e-11
    assert not stream.transfer.folder.exists()
