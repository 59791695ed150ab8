"""The process of one cell: an engine and a trainer over one set of weights, never at work at the same time.

    conductor ──submit──▶ engine.step() ─┐        rollout role: the engine loop runs whenever the engine is busy
              ◀──chunk───────────────────┘
    conductor ──micro_step──▶ trainer             training role: calls run one after the other, in the order sent
    conductor ──preempt, release, pull, …──▶      role switches: single calls between two engine steps

One thread does everything, so a switch always falls on a token boundary and no lock is needed. The process ends when
its connection does. Which call comes when is the conductor's business (cells/controller.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from opengyre.cells.channel import Channel
from opengyre.cluster.base import CellSpec
from opengyre.config import RunConfig
from opengyre.errors import CellError, EngineError, boundary
from opengyre.rollout.base import REGIONS, GenerateRequest, TokenChunk
from opengyre.rollout.tokens import from_wire
from opengyre.transfer.base import Ref


class CellWorker:
    """Answers the conductor's calls. Each ``op_*`` method is one call; its docstring says what it does."""

    def __init__(self) -> None:
        self.exit = asyncio.Event()
        self._wake = asyncio.Event()
        self._channel: Channel | None = None
        self._kv_number = 0
        self._last_gradients: str | None = None

    async def on_call(self, op: str, args: dict[str, Any]) -> Any:
        """Dispatch one call."""
        method = getattr(self, f"op_{op}", None)
        if method is None:
            raise CellError(f"unknown call {op!r}")
        return method(**args)

    def on_event(self, op: str, args: dict[str, Any]) -> None:
        """Dispatch one notification: ``submit``, ``abort``, ``drop``, ``exit``."""
        if op == "submit":
            self._submit(msgspec.convert(args["request"], GenerateRequest, dec_hook=from_wire, builtin_types=(bytes,)))
        elif op == "abort":
            self._engine.abort(args["call_id"])
            self._wake.set()
        elif op == "drop":
            self._transfer.drop(args["key"])
        elif op == "exit":
            self.exit.set()

    async def serve(self, address: str) -> None:
        """Connect, then run until told to exit or the connection ends."""
        reader, writer = await asyncio.open_unix_connection(address)
        self._channel = Channel(reader, writer, peer="conductor", on_call=self.on_call, on_event=self.on_event)
        engine = asyncio.create_task(self._engine_loop(), name="engine")
        ends = [asyncio.create_task(self.exit.wait()), asyncio.create_task(self._channel.closed.wait()), engine]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if engine in done:
            engine.result()  # a broken engine ends the cell; the conductor sees the log and replaces it
        await self._channel.close()

    async def _engine_loop(self) -> None:
        while True:
            await self._wake.wait()
            while self._engine.busy:
                with boundary(EngineError, "engine step"):
                    chunks = self._engine.step()
                for call_id, chunk in chunks:
                    self._send(call_id, chunk)
                await asyncio.sleep(0)  # let calls in: between two steps is a token boundary
            self._wake.clear()

    def _send(self, call_id: str, chunk: TokenChunk) -> None:
        assert self._channel is not None
        self._channel.notify("chunk", call_id=call_id, chunk=msgspec.to_builtins(chunk))

    def _submit(self, request: GenerateRequest) -> None:
        assert self._channel is not None
        if request.kv is not None:
            self._import_kv(request.kv)
        try:
            self._engine.submit(request)
        except EngineError as error:
            self._channel.notify("refused", call_id=request.call_id, reason=str(error))
            return
        self._wake.set()

    def _import_kv(self, kv: dict[str, Any]) -> None:
        ref = msgspec.convert(kv["ref"], Ref)
        self._engine.import_kv(kv["ids"], self._transfer.get(ref), kv["version"])
        self._transfer.drop(ref.key)

    # --- life

    def op_init(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Load the model; engine and trainer come up released. Returns the model's size."""
        cell = msgspec.convert(spec, CellSpec)
        if cell.cpu is not None:
            os.sched_setaffinity(0, {cell.cpu})
        import torch

        from opengyre.rollout.torch_engine import TorchEngine
        from opengyre.rollout.torch_model import load_model
        from opengyre.training.torch_trainer import TorchTrainer
        from opengyre.transfer.shared_memory import SharedMemoryTransfer

        torch.set_num_threads(1)  # two threads on shared cores fell to a tenth of one; parallelism is by processes
        self._name = cell.name
        self._config = msgspec.convert(cell.config, RunConfig)
        cells, model = self._config.cells, self._config.model
        device = ("cuda" if torch.cuda.is_available() else "cpu") if model.device == "auto" else model.device
        source = Path(cell.model_path)
        dtype = getattr(torch, model.dtype)
        module = load_model(source, device, dtype)
        self._transfer = SharedMemoryTransfer(cell.run_id, owner=False)
        self._engine = TorchEngine(
            module,
            name=cell.name,
            kv_tokens=cells.kv_tokens,
            max_batch=cells.max_batch,
            prefill_chunk=cells.prefill_chunk,
            context=model.context,
            device=device,
            seed=_seed(self._config.seed, cell.name),
        )
        self._engine.release(set(REGIONS))
        self._trainer = TorchTrainer(
            module,
            self._config.train,
            seed=self._config.seed,
            core=cell.core,
            temperature=self._config.sampling.temperature,
            reference=load_model(source, device, dtype) if self._config.train.kl_weight else None,
            tokenizer_from=source,
        )
        return {"parameters": sum(p.numel() for p in module.parameters()), "device": device}

    # --- rollout

    def op_load(self) -> dict[str, Any]:
        """EngineLoad as plain data."""
        return msgspec.to_builtins(self._engine.load())  # type: ignore[no-any-return]

    def op_preempt(self, export_kv: bool) -> dict[str, int]:
        """Stop every call at the token boundary we are at; their last chunks go out before this answers."""
        kv_tokens = 0
        calls = 0
        for call_id, chunk in self._engine.preempt(export_kv=export_kv):
            if chunk.finish == "preempted":
                calls += 1
                if kv := self._engine.take_export(call_id):
                    self._kv_number += 1
                    ref = self._transfer.put(f"kv-{self._name}-{self._kv_number}", kv.arrays)
                    handle = {"ref": msgspec.to_builtins(ref), "ids": kv.ids, "version": kv.version}
                    chunk = msgspec.structs.replace(chunk, kv=handle)
                    kv_tokens += len(kv.ids)
            self._send(call_id, chunk)
        return {"calls": calls, "kv_tokens": kv_tokens}

    def op_release(self, regions: list[str]) -> None:
        """Free engine memory; a call that came after the drain is stopped too, and told so by the engine loop."""
        self._engine.release(set(regions))
        self._wake.set()

    def op_resume(self, regions: list[str]) -> None:
        """Take engine memory back; the engine serves when all regions are back and the weights are known."""
        self._engine.resume(set(regions))

    # --- weights

    def op_pull(self, ref: dict[str, Any], version: int) -> None:
        """Replace the weights by a published version; running calls go on with it."""
        self._trainer.load_weights(self._transfer.get(msgspec.convert(ref, Ref)), version)
        self._engine.set_version(version)
        self._wake.set()

    def op_publish(self, key: str) -> dict[str, Any]:
        """Core: store the current weights under ``key``; returns the Ref. The engine here is on them too."""
        self._engine.set_version(self._trainer.version)
        return msgspec.to_builtins(self._transfer.put(key, self._trainer.weights()))  # type: ignore[no-any-return]

    # --- training

    def op_micro_step(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """One forward-backward unit; adds to the local gradient sums. Returns MicroStats."""
        from opengyre.samples.types import from_wire

        return msgspec.to_builtins(self._trainer.micro_step([from_wire(s) for s in samples]))  # type: ignore[no-any-return]

    def op_take_gradients(self, key: str) -> dict[str, Any]:
        """Satellite: store the local sums under ``key`` and reset them; returns the Ref.

        What it stored before is dropped: by now the core has added it, or it was refused.
        """
        if self._last_gradients is not None:
            self._transfer.drop(self._last_gradients)
        self._last_gradients = key
        return msgspec.to_builtins(self._transfer.put(key, self._trainer.take_gradients()))  # type: ignore[no-any-return]

    def op_add_gradients(self, ref: dict[str, Any]) -> None:
        """Core: add sums that a satellite stored."""
        self._trainer.add_gradients(self._transfer.get(msgspec.convert(ref, Ref)))

    def op_drop_gradients(self) -> None:
        """Forget the local sums and free their memory."""
        self._trainer.release()

    def op_commit(self, n_executions: int) -> dict[str, Any]:
        """Core: scale, clip, step. Returns StepStats."""
        return msgspec.to_builtins(self._trainer.commit(n_executions))  # type: ignore[no-any-return]

    def op_save(self, folder: str) -> None:
        """Core: write a checkpoint; it exists whole or not at all."""
        self._trainer.save(Path(folder))

    def op_restore(self, folder: str) -> int:
        """Core: load a checkpoint; returns its version."""
        self._trainer.restore(Path(folder))
        return self._trainer.version


def _seed(run_seed: int, cell: str) -> int:
    """A seed of its own for each cell's engine: two cells must not sample the same noise."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{cell}".encode(), digest_size=6).digest(), "little")


def main(address: str) -> NoReturn:
    """Run a cell that connects to the conductor's socket."""
    asyncio.run(CellWorker().serve(address))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking torch down in order costs seconds, and nothing is left to be saved
