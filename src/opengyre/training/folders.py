"""Where a run keeps its checkpoints; torch-free. What is in one is checkpoint.py's business.

A checkpoint is whole exactly when its folder has its final name and a ``state.json``: it is written beside and renamed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FOLDER = "checkpoints"  # inside a run folder
SAVING = ".saving"  # ending of folders that are being written or removed


def folder_of(run_dir: Path, version: int) -> Path:
    """Where a run keeps the checkpoint of a weights version."""
    return run_dir / FOLDER / f"version-{version:06d}"


def whole(run_dir: Path) -> dict[int, Path]:
    """A run's whole checkpoints by version, oldest first."""
    found = (p.parent for p in (run_dir / FOLDER).glob("version-*/state.json"))
    return {int(f.name.removeprefix("version-")): f for f in sorted(found) if f.suffix != SAVING}


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest ``keep``."""
    for folder in list(whole(run_dir).values())[:-keep]:
        _remove(folder)


def remove_newer(run_dir: Path, version: int) -> None:
    """Remove checkpoints beyond ``version``: written, but never acknowledged."""
    for found, folder in whole(run_dir).items():
        if found > version:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Renamed first, so that none is ever half there."""
    doomed = folder.with_name(f"{folder.name}.{os.getpid()}{SAVING}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
