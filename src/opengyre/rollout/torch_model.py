"""Running any Hugging Face decoder-only model on KV rows, and loading one from a folder.

A ``Runner`` is the small seam between the engine and a model: prefill one row, decode all rows. ``HFRunner`` works for
every model with a standard KV cache: positions, a ready 4-D mask and a ``Cache`` that reads and writes the rows are
passed in, so no mask is built and no tensor concatenated inside. ``torch_direct`` holds the faster sibling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from opengyre.errors import ConfigError, boundary
from opengyre.rollout.torch_rows import KVRows, Layout

# Largest logit difference to the plain forward that is rounding and not a fault, relative to the largest logit.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # float64: the norms of most models compute in float32
COARSE_TOLERANCE = 0.1  # bfloat16 and float16: 8 to 11 bits of mantissa over a few layers
CHECK_TOKENS = 24  # tokens of the self-check: two prefill chunks and a few decode steps
CHECK_WINDOW = 2048  # sliding windows up to this length are checked past their edge; longer ones would take seconds


class Runner(Protocol):
    """A model on KV rows. Both methods write the KV of their tokens into ``rows`` and count them there."""

    def prefill(self, rows: KVRows, row: int, ids: list[int]) -> Tensor:
        """Append ``ids`` to one row; logits [vocabulary] of the last one."""
        ...

    def decode(self, rows: KVRows, ids: list[int]) -> Tensor:
        """Append one token to each of the first len(ids) rows; logits [len(ids), vocabulary]."""
        ...

    def refresh(self) -> None:
        """Rebuild what was derived from the weights, which were replaced in place."""
        ...


def load_model(path: str | Path, device: str | torch.device, dtype: torch.dtype) -> nn.Module:
    """Load a causal LM from a local folder, ready to sample: evaluation mode, sdpa attention where the model
    has it (the library's default).

    Raises:
        ConfigError: the folder is missing or broken; names the path and what a model folder needs.
    """
    folder = Path(path)
    needs = "a model folder holds config.json and its weights as *.safetensors"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no config.json in {folder}", where="model.path", right=needs)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigError(f"no weights in {folder}", where="model.path", right=needs)
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
    except Exception as cause:  # the loader raises whatever a broken file makes it raise
        text = str(cause).strip().split("\n")[0]
        raise ConfigError(
            f"cannot load {folder}: {type(cause).__name__}: {text}", where="model.path", right=needs
        ) from cause
    return model.to(device).eval()


def kv_layout(model: nn.Module) -> Layout:
    """KV heads and dims per layer, read off a one-token forward.

    Raises:
        ConfigError: the model keeps state that is no KV cache (recurrent or linear attention layers).
    """
    config: Any = model.config
    cache = DynamicCache(config=config)
    device = next(model.parameters()).device
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), cache=cache, use_cache=True)
    layout = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ConfigError(
                f"{type(model).__name__} has a {type(layer).__name__}, which is not a KV cache of tokens",
                where="model.path",
                right="the embedded engine serves attention-only decoders; serve this model with SGLang or vLLM",
            )
        assert layer.keys is not None and layer.values is not None
        layout.append((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
    return layout


def causal_bias(start: int, tokens: int, rows: KVRows, window: int | None = None) -> Tensor:
    """Additive mask [tokens, start + tokens] for tokens at ``start``…; ``window`` limits how far each looks back."""
    mask = torch.full((tokens, start + tokens), rows.masked, dtype=rows.dtype, device=rows.device)
    if window is None:
        return mask.triu_(start + 1)
    return mask.triu(start + 1) + mask.tril(start - window)


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is partly typed
    """One layer's door to the rows: takes the new KV of a forward, gives back all KV the queries may see."""

    def __init__(self, view: RowView, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.view, self.layer, self.is_initialized = view, layer, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the rows exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, tokens, dim] and return what is visible."""
        view = self.view
        keys, values = view.rows.keys[self.layer], view.rows.values[self.layer]
        if view.row is None:
            keys[view.index, :, view.positions] = key_states[:, :, 0]
            values[view.index, :, view.positions] = value_states[:, :, 0]
            n = len(view.index)
            return keys[:n, :, : view.width], values[:n, :, : view.width]
        row = slice(view.row, view.row + 1)
        keys[row, :, view.start : view.width] = key_states
        values[row, :, view.start : view.width] = value_states
        return keys[row, :, : view.width], values[row, :, : view.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of the mask."""
        return self.view.width, 0

    def get_seq_length(self) -> int:
        """Tokens before this forward."""
        return self.view.start

    def get_max_length(self) -> int:
        """No bound of its own."""
        return -1


class RowView(Cache):
    """The ``Cache`` handed to the model: which row and columns (prefill) or positions (decode) a forward is at."""

    rows: KVRows
    row: int | None  # None: decode
    start: int
    width: int
    index: Tensor  # decode: row numbers and the position each writes
    positions: Tensor

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_RowLayer(self, layer) for layer in range(layers)])

    def at(self, rows: KVRows, row: int | None, start: int, width: int) -> RowView:
        """Point at one row's columns [start, width), or with ``row`` None at the first rows, one token each."""
        self.rows, self.row, self.start, self.width = rows, row, start, width
        return self


class HFRunner:
    """Any decoder-only model through its own forward."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.view = model, RowView(len(layout))
        config = model.config.get_text_config()  # type: ignore[union-attr,operator]
        kinds = set(getattr(config, "layer_types", None) or [])
        self.window: int | None = getattr(config, "sliding_window", None)
        if (kinds and "sliding_attention" not in kinds) or getattr(config, "use_sliding_window", True) is False:
            self.window = None
        self.mixed = self.window is not None and len(kinds) > 1  # layers differ: a mask per kind is passed

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def prefill(self, rows: KVRows, row: int, ids: list[int]) -> Tensor:
        """See Runner."""
        start, n = rows.lengths[row], len(ids)
        rows.extend(row, n)
        full = causal_bias(start, n, rows)[None, None]
        sliding = causal_bias(start, n, rows, self.window)[None, None] if self._slides(start + n) else full
        positions = torch.arange(start, start + n, device=rows.device)[None]
        view = self.view.at(rows, row, start, start + n)
        tokens = torch.tensor([ids], device=rows.device)
        return self._forward(tokens, positions, full, sliding, view)[0, -1]

    def decode(self, rows: KVRows, ids: list[int]) -> Tensor:
        """See Runner."""
        n = len(ids)
        lengths = rows.lengths[:n]
        rows.reserve(n, max(lengths) + 1)
        width = max(lengths) + 1
        view = self.view.at(rows, None, width - 1, width)
        view.index, view.positions = rows.index[:n], torch.tensor(lengths, device=rows.device)
        rows.bias[view.index, view.positions] = 0
        rows.lengths[:n] = [length + 1 for length in lengths]
        full = rows.bias[:n, None, None, :width]
        sliding = full
        if self.window is not None and width > self.window:
            behind = rows.columns[None, :width] <= (view.positions - self.window)[:, None]
            sliding = full.masked_fill(behind[:, None, None], rows.masked)
        tokens = torch.tensor(ids, device=rows.device)[:, None]
        return self._forward(tokens, view.positions[:, None], full, sliding, view)[:, -1]

    def _slides(self, width: int) -> bool:
        return self.window is not None and width > self.window

    def _forward(self, tokens: Tensor, positions: Tensor, full: Tensor, sliding: Tensor, view: RowView) -> Tensor:
        mask: Any = {"full_attention": full, "sliding_attention": sliding} if self.mixed else sliding
        out = self.model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, cache=view, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = out.logits
        return logits


def difference(runner: Runner, model: nn.Module, rows: KVRows, context: int) -> float:
    """Largest logit difference between ``runner`` and the model's plain forward, relative to the largest logit.

    Two rows of different length are prefilled in chunks and decoded together, past the sliding window if there is one.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    window = getattr(config, "sliding_window", None) or 0
    n = min(context, CHECK_TOKENS + (window if window <= CHECK_WINDOW else 0))
    ids = [(7 * i * i + 3 * i) % config.vocab_size for i in range(n)]
    chunk, decoded = max(1, n // 3), min(3, n - 2)
    worst, scale = 0.0, 1e-30
    plain = model(input_ids=torch.tensor([ids], device=rows.device), use_cache=False).logits[0]
    short = n - decoded - chunk // 2
    for row, prompt in enumerate((ids[: n - decoded], ids[:short])):
        for start in range(0, len(prompt), chunk):
            logits = runner.prefill(rows, row, prompt[start : start + chunk])
        worst = max(worst, float((logits - plain[len(prompt) - 1]).abs().max()))
    for step in range(decoded):
        at = [n - decoded + step, short + step]
        logits = runner.decode(rows, [ids[i] for i in at])
        worst = max(worst, float((logits - plain[at]).abs().max()))
    scale = max(scale, float(plain.abs().max()))
    return worst / scale


def pick_runner(model: nn.Module, layout: Layout, candidates: list[Runner], context: int) -> Runner:
    """The first candidate whose logits equal the model's own.

    Raises:
        ConfigError: none does; the model does not follow the usual position, mask and cache conventions.
    """
    first = next(model.parameters())
    limit = TOLERANCE.get(first.dtype, COARSE_TOLERANCE)
    found = []
    with torch.inference_mode(), boundary(ConfigError, "model.path"):
        for runner in candidates:
            rows = KVRows(layout, max_rows=2, context=context, dtype=first.dtype, device=first.device)
            found.append(difference(runner, model, rows, context))
            if found[-1] <= limit:
                return runner
    raise ConfigError(
        f"{type(model).__name__} does not reproduce its own logits from a KV cache (off by {max(found):.2g})",
        where="model.path",
        right="serve this model with SGLang or vLLM",
    )
