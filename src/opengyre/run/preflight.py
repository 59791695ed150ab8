"""Everything that can be found wrong with a run before anything is started or written."""

from __future__ import annotations

import fcntl
import shutil
import socket
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from opengyre.cells.policies import make_policy
from opengyre.config import RunConfig, build, load, to_toml
from opengyre.errors import ConfigError
from opengyre.executions.harness.base import Harness, Limits
from opengyre.executions.harness.registry import make_harness
from opengyre.executions.sandbox.registry import resolve_kind
from opengyre.executions.task import Task
from opengyre.executions.tasks_registry import make_tasks
from opengyre.proxy.render import Renderer
from opengyre.quickstart import POLICY_DIR
from opengyre.samples.select import load_picker

CONFIG_FILE = "config.toml"
MIN_FREE_BYTES = 64 * 2**20  # less than this and the first checkpoint or the call record would fail


@dataclass(frozen=True)
class Prepared:
    """A run that can start: every part that is made from the config alone."""

    config: RunConfig
    run_dir: Path
    model_dir: Path
    renderer: Renderer
    harness: Harness
    train: list[Task]
    held_out: list[Task]
    resumed: bool


def prepare_file(path: Path, overrides: list[str], *, resume: bool) -> Prepared:
    """A config file with ``KEY.PATH=VALUE`` overrides, or a run folder to go on with. Raises as ``prepare``."""
    if resume and path.is_dir():
        path, overrides = path / CONFIG_FILE, [*overrides, f"run_dir={str(path.absolute())!r}"]
    config = load(path, overrides)
    return prepare(config, resolve_run_dir(config), resume=resume)


def prepare(config: RunConfig, run_dir: Path, *, resume: bool) -> Prepared:
    """Check config, model, tasks, harness and run folder; nothing is written.

    Raises:
        ConfigError: what, where and what would be right.
        TaskError: an incomplete task, by name.
    """
    resumed = check_run_dir(run_dir, resume=resume)
    model_dir = resolve_model(config)
    renderer = Renderer.load(model_dir, context=config.model.context, format=config.model.format)
    tasks = make_tasks(config.tasks)
    train, held_out = list(tasks.tasks("train")), list(tasks.tasks("held_out"))
    if not train and config.steps:
        raise ConfigError("has no training task", where="tasks", right="at least one task in the train split")
    make_policy(config)
    load_picker(config.samples.picker)
    resolve_kind(config.sandbox.kind)
    check_port(config.proxy.host, config.proxy.port)
    harness = make_harness(config.harness, Limits(config.model.context, config.sampling.max_tokens))
    return Prepared(config, run_dir, model_dir, renderer, harness, train, held_out, resumed)


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if a fixed port cannot be had now."""
    if port == 0:
        return
    try:
        with socket.create_server((host, port)):
            return
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{host}:{port}: {why}", where="proxy.port", right="a free port, or 0 for any") from None


def resolve_model(config: RunConfig) -> Path:
    """The model folder that the config names."""
    name = config.model.path
    path = POLICY_DIR if name == "quickstart" else Path(name).expanduser()
    for needed in ("config.json", "tokenizer.json"):
        if not (path / needed).is_file():
            what = f"{path} is no folder" if not path.is_dir() else f"{path} has no {needed}"
            raise ConfigError(what, where="model.path", right="a Hugging Face causal-LM folder, or quickstart")
    return path


def resolve_run_dir(config: RunConfig) -> Path:
    """The run folder, with {name} and {time} filled in."""
    try:
        filled = config.run_dir.format(name=config.name, time=time.strftime("%Y%m%d-%H%M%S"))
    except (KeyError, IndexError, ValueError):
        raise ConfigError(repr(config.run_dir), where="run_dir", right="only {name} and {time} are filled in") from None
    return Path(filled).expanduser().absolute()


def check_run_dir(run_dir: Path, *, resume: bool) -> bool:
    """True if ``run_dir`` holds a run to go on with. Raises ConfigError if it cannot be used."""
    exists = (run_dir / CONFIG_FILE).is_file()
    if exists and not resume:
        raise ConfigError(f"{run_dir} holds a run", where="run_dir", right="--resume to go on, or another run_dir")
    if resume and not exists:
        raise ConfigError(f"{run_dir} holds no run to resume", where="run_dir", right="the folder of an earlier run")
    if not exists and run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(f"{run_dir} is not empty", where="run_dir", right="a new or empty folder")
    parent = next(p for p in [run_dir, *run_dir.parents] if p.exists())
    free = shutil.disk_usage(parent).free
    if free < MIN_FREE_BYTES:
        raise ConfigError(
            f"{free // 2**20} MiB are free on the disk of {run_dir}",
            where="run_dir",
            right=f"at least {MIN_FREE_BYTES // 2**20} MiB",
        )
    return exists


def load_run(run_dir: Path) -> RunConfig:
    """The resolved config that a run folder was started with."""
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        raise ConfigError("holds no run", where=str(run_dir), right="a folder made by opengyre train")
    return build(tomllib.loads(file.read_text()))


def claim_run_dir(prepared: Prepared) -> IO[bytes]:
    """Make the run folder and lock it for this process; keep the returned file open.

    Raises:
        ConfigError: the folder cannot be made, or another process runs in it.
    """
    run_dir = prepared.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / "lock").open("wb")
    except OSError as error:
        raise ConfigError(
            f"{run_dir}: {error.strerror}", where="run_dir", right="a folder that can be written"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"{run_dir} is in use by another process", where="run_dir") from None
    if not prepared.resumed:
        (run_dir / CONFIG_FILE).write_text(to_toml(prepared.config))
    return lock
