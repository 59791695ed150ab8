"""Log-probabilities of trainable tokens, and nothing else.

    pack ──▶ body (no head) ──▶ hidden states at the M places that predict a trainable token ──▶ head ──▶ (M,)

Prompt tokens are most of an agent's trajectory; they cost no vocabulary projection. Two things are found out about a
model by trying them on a few tokens, once, before they are relied on: whether its head is a plain projection of its
last hidden states, and whether its attention runs on packed trees. Where not, full logits and padded batches do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opengyre.errors import TrainingError
from opengyre.record.types import Role
from opengyre.samples.types import Sample
from opengyre.training.attention import ATTENTION, Memory, TreePlan, attention_of
from opengyre.training.pack import Pack, Window, ordered, pack, within_budget
from opengyre.training.windows import in_windows

LOGITS_AT_ONCE = 1 << 26  # logits held for the backward pass: 256 MiB in float32; more are recomputed in blocks
LAYERS_WITH_PLAIN_ATTENTION = {"full_attention", "sliding_attention"}


class Forward:
    """Log-probabilities under a Hugging Face causal LM.

    Args:
        model: shared with others as the caller likes; its attention setting is put back after every call.
        temperature: of sampling. Behaviour log-probabilities are of the distribution that was drawn from, so the new
            ones are taken of ``logits / temperature`` too; with unchanged weights the ratio is then 1.
        seed: of the few random tokens of the try-outs.
    """

    def __init__(self, model: Any, *, temperature: float = 1.0, seed: int = 0) -> None:
        self._model, self._temperature, self._seed = model, temperature, seed
        self._split: bool | None = None
        self._trees: bool | None = None

    @property
    def head_split(self) -> bool:
        """True if only trainable positions are projected on the vocabulary."""
        if self._split is None:
            self._split = self._try_split()
        return self._split

    @head_split.setter
    def head_split(self, on: bool) -> None:
        self._split = on

    @property
    def trees(self) -> bool:
        """True if shared prefixes are computed once."""
        if self._trees is None:
            self._trees = self._try_trees()
        return self._trees

    @trees.setter
    def trees(self, on: bool) -> None:
        self._trees = on

    def plan(self, samples: Sequence[Sample], budget: int, row: int | None = None) -> list[Pack]:
        """Split ``samples`` into passes that hold the activations of at most ``budget`` tokens.

        ``row``: the most tokens of a pack that is computed in windows. A sample longer than the budget goes alone, in
        windows where trees can be computed.
        """
        if self.trees:
            return within_budget(samples, budget, row)
        return [pack(batch) for batch in _padded_batches(samples, budget)]

    def logprobs(self, packed: Pack, window: int | None = None) -> Tensor:
        """(M,) log-probability of each trainable token of the pack; float32 or better.

        ``window``: packs with more tokens are computed so many at a time. The backward pass of such a one adds to
        ``.grad`` of the model's parameters directly, as gradient checkpointing does.
        """
        if not self.trees:
            return self._padded(packed)
        if window is not None and len(packed.ids) > window:
            return in_windows(packed, window, self._window, next(self._model.parameters()))
        return self._on_trees(packed)

    def cost(self, packed: Pack) -> int:
        """Unique tokens the pass computes for the pack, padding included."""
        if self.trees:
            return len(packed.ids)
        return len(packed.samples) * max(len(s.ids) for s in packed.samples)

    def _on_trees(self, packed: Pack) -> Tensor:
        whole = Window(0, len(packed.ids), packed.chains, np.arange(len(packed.sources)))
        return self._window(packed, whole, None)

    def _window(self, packed: Pack, window: Window, memory: Memory | None) -> Tensor:
        """Log-probabilities of the trainable tokens predicted in a window."""
        rows, device = slice(window.first, window.last), self._model.device
        sources, labels = packed.sources[window.trained] - window.first, packed.labels[window.trained]
        ids, positions, at, targets = (
            torch.from_numpy(x).to(device) for x in (packed.ids[rows], packed.positions[rows], sources, labels)
        )
        entry = self._entry()  # tried, if need be, with the model's own attention
        plan = TreePlan.of(window.chains, window.first, memory)
        with attention_of(self._model, ATTENTION):
            states = self._states(entry, ids[None], position_ids=positions[None], tree=plan)
        return self._project(states[0].index_select(0, at), targets)

    def _padded(self, packed: Pack) -> Tensor:
        device = self._model.device
        longest = max(len(s.ids) for s in packed.samples)
        ids = np.zeros((len(packed.samples), longest), np.int64)
        for row, sample in enumerate(packed.samples):
            ids[row, : len(sample.ids)] = sample.ids
        # No mask: what pads a row comes after all of it, and a causal model does not look ahead.
        states = self._states(self._entry(), torch.from_numpy(ids).to(device))
        places = [row * longest + np.flatnonzero(s.mask) - 1 for row, s in enumerate(packed.samples)]
        flat = states.flatten(0, 1).index_select(0, torch.from_numpy(np.concatenate(places)).to(device))
        return self._project(flat, torch.from_numpy(packed.labels).to(device))

    def _entry(self) -> Any:
        """What to call: the body where the head can be taken apart, else the whole model."""
        return self._model.base_model if self.head_split else self._model

    def _states(self, entry: Any, ids: Tensor, **inputs: Any) -> Tensor:
        """(B, T, D) last hidden states of the body, or (B, T, V) logits of the whole model."""
        output = entry(input_ids=ids, use_cache=False, **inputs)
        states: Tensor = output.logits if entry is self._model else output.last_hidden_state
        return states

    def _project(self, states: Tensor, labels: Tensor) -> Tensor:
        head = self._model.get_output_embeddings() if self.head_split else torch.nn.Identity()
        rows = max(1, LOGITS_AT_ONCE // self._model.get_output_embeddings().weight.shape[0])
        if len(states) <= rows:
            return _gather(states, labels, head, self._temperature)
        blocks = [
            checkpoint(_gather, s, y, head, self._temperature, use_reentrant=False)
            for s, y in zip(torch.split(states, rows), torch.split(labels, rows), strict=True)
        ]
        return torch.cat(blocks)

    @torch.no_grad()
    def _try_split(self) -> bool:
        head = self._model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or self._model.base_model is self._model:
            return False
        ids = torch.from_numpy(self._random_ids(8))[None].to(self._model.device)
        states = getattr(self._model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if states is None or states.shape[-1] != head.weight.shape[1]:
            return False
        return self._same(head(states), self._model(input_ids=ids, use_cache=False).logits)

    @torch.no_grad()
    def _try_trees(self) -> bool:
        config = self._model.config.get_text_config()
        if not set(getattr(config, "layer_types", None) or ()) <= LAYERS_WITH_PLAIN_ATTENTION:
            return False
        ids = self._random_ids(13)
        branches = [ids[:9], np.concatenate([ids[:4], ids[9:]])]
        packed = pack([_probe(i, branch) for i, branch in enumerate(branches)])
        try:
            got = self._on_trees(packed)
            cut = in_windows(packed, 4, self._window, next(self._model.parameters()))
        except (TrainingError, TypeError, ValueError, AttributeError):  # no attention interface, or one without plans
            return False
        want = torch.cat([self._padded(pack([s])) for s in packed.samples])
        return self._same(got, want) and self._same(cut, want)

    def _random_ids(self, count: int) -> np.ndarray:
        vocab = self._model.get_input_embeddings().weight.shape[0]
        return np.random.default_rng(self._seed).integers(0, vocab, count)

    def _same(self, got: Tensor, expected: Tensor) -> bool:
        """Equal up to what the dtype's rounding does to a model's output, in units of its spread."""
        tolerance = 1e-3 if self._model.dtype in (torch.float32, torch.float64) else 0.1
        spread = float(expected.double().std())
        return bool((got.double() - expected.double()).abs().max() <= tolerance * spread)


def _gather(states: Tensor, labels: Tensor, head: Any, temperature: float) -> Tensor:
    logits = head(states)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    return -torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def _padded_batches(samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
    batches = list[list[Sample]]()
    for sample in sorted(ordered(samples), key=lambda s: len(s.ids)):  # ascending: the last one is the longest
        if not batches or (len(batches[-1]) + 1) * len(sample.ids) > budget:
            batches.append([])
        batches[-1].append(sample)
    return batches


def _probe(number: int, ids: np.ndarray) -> Sample:
    mask = np.arange(len(ids)) > 0
    return Sample(
        sample_id=str(number),
        execution_id="",
        query_id="",
        role=Role.MAIN,
        ids=ids.astype(np.int32),
        mask=mask,
        logprobs=np.zeros(len(ids), np.float32),
        advantage=0.0,
        weight=0.0,
        oldest_version=0,
        newest_version=0,
    )
