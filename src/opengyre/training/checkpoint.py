"""Checkpoints that either exist whole or do not exist.

    <name>.<pid>.saving/  ── every file fsynced ──▶  rename  ──▶  <name>/  ── parent fsynced

A folder is a plain Hugging Face model folder (config, safetensors, tokenizer files), so transformers, vLLM and SGLang
load it as it is, plus ``optimizer.pt`` and ``state.json``. A killed save leaves a ``.saving`` folder, which is never
read and which the next save removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging as transformers_logging

from opengyre.errors import TrainingError
from opengyre.training.folders import SAVING

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
)
# What two configs of one architecture may differ in without being another model: bookkeeping and runtime choices.
VOLATILE = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"}


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``state.json``. ``parameters`` is the fingerprint: (shape, dtype) by name, tied tensors once."""

    version: int
    steps: int
    parameters: dict[str, tuple[list[int], str]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint in memory, checked to be of the model it is for."""

    version: int
    steps: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


def save(
    folder: Path, model: Any, optimizer: dict[str, Any], version: int, steps: int, *, tokenizer_from: Path | None = None
) -> None:
    """Write a checkpoint to ``folder``, which must not exist.

    Raises:
        TrainingError: the folder exists, or the disk is full or broken; nothing is left behind then.
    """
    if folder.exists():
        raise TrainingError("exists already", where=str(folder), right="a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}{SAVING}")
    try:
        temporary.mkdir()
        with _quiet():
            model.save_pretrained(temporary)
        _copy_tokenizer(tokenizer_from, temporary)
        torch.save(optimizer, temporary / "optimizer.pt")
        state = State(version=version, steps=steps, parameters=_fingerprint(model))
        (temporary / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        for path in temporary.iterdir():
            _fsync(path)
        _fsync(temporary)
        temporary.rename(folder)
        _fsync(folder.parent)
    except (OSError, SafetensorError, RuntimeError) as error:  # the latter two: how safetensors and torch.save say so
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free
        raise TrainingError(
            f"checkpoint not written: {error}", where=str(folder), right=f"{free / 1e6:.0f} MB are free there"
        ) from error


def load(folder: Path, model: Any) -> Loaded:
    """Read a checkpoint and check that it is one of ``model``.

    Raises:
        TrainingError: incomplete, damaged, or of another model (names the tensor, shape or config key that differs).
    """
    where = str(folder)
    try:
        state = msgspec.json.decode((folder / "state.json").read_bytes(), type=State)
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise TrainingError(
            f"not a readable checkpoint: {error}", where=where, right="a folder that save wrote"
        ) from None
    _check_config(config, json.loads(model.config.to_json_string(use_diff=False)), where)
    _check_parameters(state.parameters, _fingerprint(model), where)
    try:
        weights = _read_weights(folder, model)
        optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, KeyError, EOFError) as error:
        raise TrainingError(f"damaged checkpoint: {error}", where=where, right="an older one") from None
    return Loaded(state.version, state.steps, weights, optimizer)


def sweep(parent: Path) -> None:
    """Remove what killed saves left in ``parent``; the ones of living processes stay."""
    for folder in parent.glob(f"*{SAVING}"):
        pid = folder.name.removesuffix(SAVING).rpartition(".")[2]
        if not pid.isdigit() or not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _fingerprint(model: Any) -> dict[str, tuple[list[int], str]]:
    return {n: (list(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in model.named_parameters()}


def _check_config(saved: dict[str, Any], own: dict[str, Any], where: str) -> None:
    for key in sorted((saved.keys() & own.keys()) - VOLATILE):
        if saved[key] != own[key]:
            raise TrainingError(f"config {key} is {saved[key]!r}", where=where, right=f"this model has {own[key]!r}")


def _check_parameters(
    saved: dict[str, tuple[list[int], str]], own: dict[str, tuple[list[int], str]], where: str
) -> None:
    for name in own:
        if name not in saved:
            raise TrainingError(f"has no tensor {name}", where=where, right="a checkpoint of this model")
        if saved[name] != own[name]:
            got, right = (f"{dtype} {shape}" for shape, dtype in (saved[name], own[name]))
            raise TrainingError(f"tensor {name} is {got}", where=where, right=f"this model has {right}")
    if extra := sorted(saved.keys() - own.keys()):
        raise TrainingError(f"has a tensor {extra[0]} that this model lacks", where=where)


def _read_weights(folder: Path, model: Any) -> dict[str, Tensor]:
    """Through the model's own loader, which undoes what its saver does to names and layouts."""
    with _quiet():
        saved, info = type(model).from_pretrained(
            folder, local_files_only=True, dtype=model.dtype, output_loading_info=True
        )
    if absent := sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"]):
        raise KeyError(absent[0])  # the loader would have filled it with noise
    return {name: parameter.detach() for name, parameter in saved.named_parameters()}


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers: the terminal belongs to the live view."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _copy_tokenizer(source: Path | None, target: Path) -> None:
    if source is None or not source.is_dir():
        return
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # one save at a time in a process: what is there is from a failed one
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
