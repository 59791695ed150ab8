"""The embedded rollout engine: continuous batching, prefix cache and exact log-probabilities in plain PyTorch.

    submit ─▶ waiting ──────▶ prefilling ───────▶ running ─────▶ finished
                 ▲   row taken,    │  chunk by chunk   │  one token       │ KV of the new tokens
                 │   cached prefix │                   │  a step          ▼
                 │   copied in     │                   │             prefix cache
                 └─────────────────┴───────────────────┘
                     new weights, or KV memory ran out: back to the queue, sampled tokens kept

One ``step`` is at most one chunk of prefill and one decode of all running calls, so a long prompt delays the others
by one chunk only. Nothing waits inside: the owner calls ``step`` while ``busy`` and hands the chunks on. A call waits
for a row (``max_batch``) and for room (``kv_tokens``); room comes from finished calls, then from evicted prefixes, and
at last from the youngest call, so the oldest always goes on.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opengyre.errors import EngineError
from opengyre.rollout.base import REGIONS, EngineLoad, GenerateRequest, TokenChunk
from opengyre.rollout.torch_cache import PrefixCache, as_ids
from opengyre.rollout.torch_calls import Call, EngineMetrics, KVExport, check_request
from opengyre.rollout.torch_direct import DirectRunner, supports
from opengyre.rollout.torch_model import HFRunner, Runner, kv_layout, pick_runner
from opengyre.rollout.torch_rows import KVRows, from_arrays, to_arrays
from opengyre.rollout.torch_sample import Sampling, draw, uniforms

HEADROOM = 32  # free tokens per running call before another is admitted, or it would be put back soon after
EVICT_SHARE = 16  # evict at least 1/16 of kv_tokens at once: an eviction walks the tree

Chunks = list[tuple[str, TokenChunk]]


class TorchEngine:
    """A served policy, driven step by step from one thread.

    Args:
        model: any Hugging Face causal LM; its weights stay its owner's, who calls ``set_version`` after changing them.
        kv_tokens: most tokens of KV held at once, running calls and cached prefixes together.
        max_batch: most calls decoded together.
        prefill_chunk: most prompt tokens computed in one step.
        context: longest prompt plus sampled tokens of a call.
        emit_every: tokens per chunk of a running call; a finish, a stop or a new version flushes.
        version: weights version ``model`` holds now.
        seed: of the generator that seeds requests without a seed; None takes a random one.
        fast: False keeps to the model's own forward.

    Raises:
        ConfigError: the model has no standard KV cache.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        kv_tokens: int,
        max_batch: int,
        prefill_chunk: int,
        context: int,
        device: torch.device | str,
        emit_every: int = 8,
        version: int = 0,
        seed: int | None = None,
        fast: bool = True,
    ) -> None:
        self.name, self.model, self.version = name, model.eval(), version
        self.kv_tokens, self.max_batch, self.prefill_chunk = kv_tokens, max_batch, prefill_chunk
        self.emit_every, self.device = emit_every, torch.device(device)
        self.limit = min(context, kv_tokens)
        self.metrics = EngineMetrics()
        config: Any = model.config
        self.vocabulary: int = config.get_text_config().vocab_size
        layout = kv_layout(model)
        candidates: list[Runner] = [HFRunner(model, layout)]
        if fast and supports(model):
            candidates.insert(0, DirectRunner(model, context))
        self.runner = pick_runner(model, layout, candidates, context)
        dtype = next(model.parameters()).dtype
        self._rows = KVRows(layout, max_rows=max_batch, context=context, dtype=dtype, device=self.device)
        self._cache = PrefixCache()
        self._waiting: deque[Call] = deque()
        self._prefilling: Call | None = None
        self._running: list[Call] = []  # call i decodes in row i; the prefilling call's row follows
        self._outbox: Chunks = []
        self._exports: dict[str, KVExport] = {}
        self._released: set[str] = set()
        self._weights_current = True
        self._sampling: Sampling | None = None  # of the running calls; None after their number or order changed
        self._generator = torch.Generator()
        self._generator.manual_seed(seed) if seed is not None else self._generator.seed()
        self._orders = 0

    # -- calls ---------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """Every region is back, and the weights version was set since the weights were last released."""
        return not self._released and self._weights_current

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do or to deliver."""
        return bool(self._outbox) or (self.serving and bool(self._waiting or self._prefilling or self._running))

    def submit(self, request: GenerateRequest) -> None:
        """Queue a call.

        Raises:
            EngineError: not serving, a call of that id is here, or a call that can never be served; names the figures.
        """
        if not self.serving:
            missing = ", ".join(sorted(self._released)) or "a weights version set since their release"
            raise EngineError(f"not serving: waits for {missing}", where=self.name, right="retry on another cell")
        if any(call.request.call_id == request.call_id for call in self._calls()):
            raise EngineError(f"call {request.call_id} is already here", where=self.name, right="unique call ids")
        check_request(request, limit=self.limit, vocabulary=self.vocabulary, where=self.name)
        seed = request.seed
        if seed is None:
            seed = int(torch.randint(1 << 62, (), generator=self._generator))
        call = Call(request, self._orders, seed, list(request.prompt_ids), frozenset(request.stop_token_ids))
        self._orders += 1
        self._waiting.append(call)

    @torch.inference_mode()
    def abort(self, call_id: str) -> None:
        """Drop a call at once; its last chunk comes with the next step. An unknown id is fine (it just finished)."""
        for call in self._calls():
            if call.request.call_id == call_id:
                self._outbox.append((call_id, call.chunk(self.version, "aborted")))
                self._drop(call)
                return

    @torch.inference_mode()
    def step(self) -> Chunks:
        """Advance: up to ``prefill_chunk`` prompt tokens, one decode of the running calls. [] when idle."""
        if self.serving and (self._waiting or self._prefilling or self._running):
            began = time.perf_counter()
            if self.model.training:
                self.model.eval()  # a trainer in the same cell shares the module
            self._prefill()
            if self._running:
                self._decode()
            self.metrics.busy_s += time.perf_counter() - began
        chunks, self._outbox = self._outbox, []
        return chunks

    @torch.inference_mode()
    def preempt(self, *, export_kv: bool) -> Chunks:
        """Stop every call at a token boundary; all chunks still owed, each call's last with finish ``preempted``.

        With ``export_kv`` the KV computed so far is copied out; fetch it per call with ``take_export``.
        """
        if export_kv:
            self._exports = {}
        for call in sorted(self._calls(), key=lambda c: c.order):
            call_id = call.request.call_id
            if export_kv and (export := self._export(call)):
                self._exports[call_id] = export
            self._outbox.append((call_id, call.chunk(self.version, "preempted")))
        self._forget_calls()
        chunks, self._outbox = self._outbox, []
        return chunks

    def take_export(self, call_id: str) -> KVExport | None:
        """The KV exported when ``call_id`` was preempted, once; None if it had none."""
        return self._exports.pop(call_id, None)

    def load(self) -> EngineLoad:
        """What the router sees."""
        running = len(self._running) + (self._prefilling is not None)
        held = self._rows.used + self._cache.tokens
        return EngineLoad(running, len(self._waiting), held, self.version, self.serving)

    # -- weights and memory --------------------------------------------------------------------------------------

    def release(self, regions: set[str]) -> None:
        """Give regions up. Calls still here are preempted first (their chunks come with the next step): a drain that
        cannot hang. Releasing ``kv`` frees all KV memory; either region closes admission.
        """
        self._check_regions(regions)
        if not regions:
            return
        self._outbox = self.preempt(export_kv=False)
        self._released |= regions
        if "kv" in regions:
            self._rows.free_memory()
            self._cache.clear()
        if "weights" in regions:
            self._weights_current = False

    def resume(self, regions: set[str]) -> None:
        """Take regions back; one that was not released is fine. KV memory grows again with use."""
        self._check_regions(regions)
        self._released -= regions

    @torch.inference_mode()
    def set_version(self, version: int) -> None:
        """``model`` now holds ``version``: older KV is dropped and the calls here go on from their tokens on it."""
        self.runner.refresh()
        self._weights_current = True
        if version == self.version:
            return
        for call in self._calls():
            if call.pending_ids:
                self._outbox.append((call.request.call_id, call.chunk(self.version)))
        self.version = version
        self._cache.clear()
        active = sorted(self._active(), key=lambda c: c.order)
        self._forget_calls(keep_waiting=True)
        self._waiting.extendleft(reversed(active))

    @torch.inference_mode()
    def export_kv(self, ids: list[int]) -> KVExport | None:
        """KV of the longest cached prefix of ``ids`` (an idle session's, say), or None."""
        n, found = self._cache.match(as_ids(ids))
        if not n:
            return None
        parts = [[t[:, :take] for t in segment] for segment, take in found]
        joined = [torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)]
        return KVExport(ids[:n], to_arrays(joined), self.version)

    @torch.inference_mode()
    def import_kv(self, ids: list[int], arrays: dict[str, Any], version: int) -> int:
        """Put another cell's KV of ``ids`` in the prefix cache; the tokens added.

        Refused, which is counted and returns 0: other weights version, not serving, no room, arrays that do not fit.
        """
        rows = self._rows
        fits = version == self.version and self.serving and bool(ids)
        segment = from_arrays(arrays, len(ids), rows.layout, rows.dtype, rows.device) if fits else None
        if segment is None or not self._make_room(len(ids)):
            self.metrics.imports_refused += 1
            return 0
        tensors = segment
        added = self._cache.insert(as_ids(ids), lambda start, end: [t[:, start:end].contiguous() for t in tensors])
        self.metrics.imported_tokens += added
        return added

    # -- one step ------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        budget = self.prefill_chunk
        while budget > 0:
            call = self._prefilling or self._admit()
            if call is None:
                return
            row = len(self._running)
            done = self._rows.lengths[row]
            n = min(budget, len(call.ids) - done)
            if not self._make_room(n):
                return
            logits = self.runner.prefill(self._rows, row, call.ids[done : done + n])
            self.metrics.prefill_tokens += n
            budget -= n
            if done + n < len(call.ids):
                return
            self._prefilling = None
            self._running.append(call)
            self._sampling = None
            if self._cache.tokens + self._rows.used + len(call.ids) <= self.kv_tokens:
                self._remember(call, row)  # now, so that its group shares the prompt
            self._sample([call], logits[None], Sampling([_settings(call)], self.device))

    def _admit(self) -> Call | None:
        """Take the first waiting call into the row behind the running ones, with its cached prefix."""
        if not self._waiting or len(self._running) >= self.max_batch:
            return None
        call = self._waiting[0]
        if self._rows.used + len(call.ids) + 1 + HEADROOM * len(self._running) > self.kv_tokens and self._running:
            return None
        self._waiting.popleft()
        self._prefilling = call
        n, found = self._cache.match(as_ids(call.ids[:-1]))  # the last token is computed: it yields the logits
        self._make_room(n)
        for segment, take in found:
            self._rows.append(len(self._running), segment, take)
        self.metrics.cached_tokens += n
        if call.cached_tokens is None:
            call.cached_tokens = n
        return call

    def _decode(self) -> None:
        while not self._make_room(len(self._running)):
            self._retract(max(self._active(), key=lambda c: c.order))
        if not self._running:
            return
        calls = list(self._running)
        logits = self.runner.decode(self._rows, [call.ids[-1] for call in calls])
        if self._sampling is None:
            self._sampling = Sampling([_settings(call) for call in calls], self.device)
        self._sample(calls, logits, self._sampling)

    def _sample(self, calls: list[Call], logits: Tensor, sampling: Sampling) -> None:
        """Draw each call's next token, emit what is due, retire what finished."""
        seeds = np.array([call.seed % (1 << 64) for call in calls], dtype=np.uint64)
        positions = np.array([len(call.ids) for call in calls], dtype=np.uint64)
        ids, logprobs = draw(logits, sampling, uniforms(seeds, positions))
        self.metrics.decoded_tokens += len(ids)
        for call, token, logprob in zip(calls, ids, logprobs, strict=True):
            finish = call.add(token, logprob, self.limit)
            if finish or len(call.pending_ids) >= self.emit_every:
                self._outbox.append((call.request.call_id, call.chunk(self.version, finish)))
            if finish:
                self._remember(call, self._running.index(call))
                self._drop(call)

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _active(self) -> list[Call]:
        return [*self._running, *([self._prefilling] if self._prefilling else [])]

    def _calls(self) -> list[Call]:
        return [*self._active(), *self._waiting]

    def _make_room(self, tokens: int) -> bool:
        """Evict cached prefixes until ``tokens`` more fit; False if the calls themselves fill the memory."""
        short = self._rows.used + self._cache.tokens + tokens - self.kv_tokens
        if short > 0 and self._cache.tokens:
            dropped = self._cache.evict(max(short, self.kv_tokens // EVICT_SHARE))
            self.metrics.evicted_tokens += dropped
            short -= dropped
        return short <= 0

    def _remember(self, call: Call, row: int) -> None:
        """Keep a row's KV as a cached prefix; only tokens not held yet are copied. The caller sees to the room."""
        held = self._rows.lengths[row]
        self._cache.insert(as_ids(call.ids[:held]), lambda start, end: self._rows.copy_out(row, start, end))

    def _retract(self, call: Call) -> None:
        """Put a call back to the head of the queue; its sampled tokens stay, its KV is computed again later."""
        self._drop(call)
        self._waiting.appendleft(call)
        self.metrics.retracted_calls += 1

    def _drop(self, call: Call) -> None:
        """Take a call out of wherever it is; the last running row moves into the gap, the prefilling one follows."""
        if call in self._waiting:
            self._waiting.remove(call)
            return
        behind = len(self._running)
        if call is self._prefilling:
            self._rows.clear(behind)
            self._prefilling = None
            return
        row, last = self._running.index(call), behind - 1
        self._rows.clear(row)
        self._rows.move(last, row)
        self._running[row] = self._running[last]
        self._running.pop()
        if self._prefilling:
            self._rows.move(behind, last)
        self._sampling = None

    def _forget_calls(self, *, keep_waiting: bool = False) -> None:
        for row in range(len(self._active())):
            self._rows.clear(row)
        self._running, self._prefilling, self._sampling = [], None, None
        if not keep_waiting:
            self._waiting.clear()

    def _export(self, call: Call) -> KVExport | None:
        """KV of a call so far: its row's, or a waiting call's cached prefix."""
        if call in self._waiting:
            return self.export_kv(call.ids[:-1])
        row = self._active().index(call)
        held = self._rows.lengths[row]
        if not held:
            return None
        return KVExport(call.ids[:held], to_arrays(self._rows.copy_out(row, 0, held)), self.version)

    @staticmethod
    def _check_regions(regions: set[str]) -> None:
        if unknown := regions - set(REGIONS):
            raise EngineError(f"unknown region {sorted(unknown)}", right=f"any of {', '.join(REGIONS)}")


def _settings(call: Call) -> tuple[float, float, int]:
    return call.request.temperature, call.request.top_p, call.request.top_k
