"""Pinned harnesses: which versions we know, where they are found, how they are installed.

Each harness has a folder of its own under ``pins/`` (an npm lock, or pip requirements), so that nothing is installed
which was not asked for, and none of their install scripts runs. Versions are pinned because what we know of a harness -
the environment that keeps it quiet, how its roles and its compaction show on the wire - was measured on one version.
"""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from opengyre.errors import ConfigError, HarnessError

PINS = Path(__file__).parent / "pins"
DEFAULT_DIR = Path("~/.cache/opengyre/harnesses")
VARIABLE = "OPENGYRE_HARNESSES"  # folders to look into first, separated as in PATH
STAMP = "installed"  # in a harness's folder: written last, so that half an installation is none
INSTALL_S = 1800.0  # up to 560 MB over a slow line; without a bound a dead registry would hang a CI job
SHOWN = 2000  # characters of npm's or pip's last words: its error, not its progress
VERSION_S = 300.0  # a cold start reads up to 275 MB from disk; 60 s were not enough on an overloaded machine


@dataclass(frozen=True)
class Pin:
    """One harness.

    Args:
        name: as in ``harness.kind``.
        version: the one we support.
        files: where its program lies below its folder, the preferred first; ``{arch}`` is npm's name of ours.
        command: its name on PATH.
        asks: prints the version; ``{program}`` and ``{folder}`` (the program's) are filled in.
        imports: the modules that a Python program works with.
    """

    name: str
    version: str
    files: tuple[str, ...]
    command: str
    asks: tuple[str, ...] = ("{program}", "--version")
    imports: str = ""


_NODE = "node_modules"
PINNED = {
    pin.name: pin
    for pin in (
        Pin(
            "claude_code",
            "2.1.220",
            (
                f"{_NODE}/@anthropic-ai/claude-code-linux-{{arch}}/claude",  # a native program: needs no node
                f"{_NODE}/@anthropic-ai/claude-code-linux-{{arch}}-musl/claude",
            ),
            "claude",
        ),
        Pin(
            "opencode",
            "1.18.33",
            (
                f"{_NODE}/opencode-linux-{{arch}}/bin/opencode",  # what its install script would link to
                f"{_NODE}/opencode-linux-{{arch}}-baseline/bin/opencode",
                f"{_NODE}/opencode-linux-{{arch}}-musl/bin/opencode",
            ),
            "opencode",
        ),
        Pin(
            "codex",
            "0.171.0",
            (  # the native program; what npm links to is a script that needs node to start it
                f"{_NODE}/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
                f"{_NODE}/@openai/codex-linux-arm64/vendor/aarch64-unknown-linux-musl/bin/codex",
            ),
            "codex",
        ),
        Pin("qwen_code", "0.15.10", (f"{_NODE}/.bin/qwen",), "qwen"),
        Pin(
            "mini_swe_agent",
            "2.4.6",
            ("venv/bin/mini",),
            "mini",
            # It has no flag for it, and starting it writes a configuration.
            ("{folder}/python", "-c", "from importlib.metadata import version; print(version('mini-swe-agent'))"),
            "minisweagent.run.mini, minisweagent.models.litellm_model",
        ),
    )
}


def pinned(name: str) -> Pin:
    """The pin called ``name``. Raises ConfigError naming those there are."""
    if name not in PINNED:
        raise ConfigError(f"{name!r}", where="harness", right="one of " + ", ".join(PINNED))
    return PINNED[name]


def folders() -> list[Path]:
    """Where installed harnesses are looked for, first match wins."""
    named = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return [folder.expanduser().absolute() for folder in (*named, DEFAULT_DIR)]


def find(name: str) -> Path | None:
    """The program of a harness: in ``$OPENGYRE_HARNESSES``, in the default folder, then on PATH. None if nowhere."""
    pin = pinned(name)
    for folder in folders():
        if (folder / name / STAMP).is_file() and (program := _program(pin, folder / name)):
            return program
    on_path = shutil.which(pin.command)
    return Path(on_path) if on_path else None


def require(name: str, path: str | None = None) -> Path:
    """The program of a harness, of the pinned version.

    Args:
        name: of the harness.
        path: the program, if the user names it (``harness.options.path``).

    Raises:
        ConfigError: not found, or of another version; says what to run.
    """
    pin = pinned(name)
    program = Path(path).expanduser().absolute() if path else find(name)
    how = f"run: opengyre harness install {name}"
    if program is None:
        raise ConfigError(f"{name} {pin.version} is not installed", where="harness.kind", right=how)
    where = "harness.options.path" if path else "harness.kind"
    if not program.is_file() or not os.access(program, os.X_OK):
        raise ConfigError(f"{program} is no program", where=where, right=how)
    found = version_of(pin, program)
    if pin.version not in found.split():
        what = f"{program} is {found or 'silent about its version'}"
        raise ConfigError(what, where=where, right=f"{name} {pin.version}; {how}")
    return program


@functools.cache
def version_of(pin: Pin, program: Path) -> str:
    """The first line a program says of its version; asked once a process. Empty if it says nothing."""
    argv = [word.format(program=program, folder=program.parent) for word in pin.asks]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=VERSION_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.strip().splitlines()), "")


def install(name: str, folder: Path) -> Path:
    """Install one pinned harness into ``folder/name`` from npm or PyPI, if it is not there; returns its program.

    Raises:
        HarnessError: npm or pip is absent or failed, or what they installed is not the pinned program.
    """
    pin, folder = pinned(name), folder.expanduser().absolute()
    place = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs that start at once share one installation
        wanted = _fingerprint(name)
        if not _current(place, wanted):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(PINS / name, place)
            for command in _commands(pin, place):
                _run(command, place, name)
            (place / STAMP).write_text(wanted)
        program = _program(pin, place)
    if program is None:
        raise HarnessError(f"{name} has no program for {platform.machine()}", where=str(place))
    return require(name, str(program))


def _program(pin: Pin, place: Path) -> Path | None:
    arch = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    candidates = (place / file.format(arch=arch) for file in pin.files)
    return next((file for file in candidates if file.is_file()), None)


def _fingerprint(name: str) -> str:
    """Changes with the pins of a harness."""
    files = sorted(file for file in (PINS / name).iterdir() if file.is_file())
    return blake2b(b"\0".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def _current(place: Path, wanted: str) -> bool:
    stamp = place / STAMP
    return stamp.is_file() and stamp.read_text() == wanted


def _commands(pin: Pin, place: Path) -> list[list[str]]:
    """What installs the pins that were copied to ``place``. No install script of any package runs."""
    if (place / "package.json").is_file():
        return [["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]]
    python = str(place / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    # Byte code of what it imports, which a sandbox could not write later; that of all it brings takes 45 CPU seconds.
    clean = ["env", "-u", "PYTHONDONTWRITEBYTECODE", "-u", "XDG_CONFIG_HOME", f"HOME={place}"]
    clean += ["LITELLM_LOCAL_MODEL_COST_MAP=True"]  # else importing litellm asks GitHub for prices
    return [
        [sys.executable, "-m", "venv", str(place / "venv")],
        [*pip, "--no-compile", "--no-deps", "-r", "requirements.txt"],  # the pins are complete: nothing to resolve
        [*clean, python, "-c", f"import {pin.imports}"],
    ]


def _run(command: list[str], place: Path, name: str) -> None:
    if shutil.which(command[0]) is None:
        how = "install Node.js 20 or newer"
        raise HarnessError(f"{command[0]} is not on PATH", where=f"installing {name}", right=how)
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise HarnessError(f"{' '.join(command)}: not done in {INSTALL_S:g} s", where=f"installing {name}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-SHOWN:]
        raise HarnessError(f"{' '.join(command)} ended with {done.returncode}: {said}", where=f"installing {name}")
