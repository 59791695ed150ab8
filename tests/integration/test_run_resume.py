"""A run that is SIGKILLed again and again ends as one that never was: every query trained once, nothing left over."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import tiny_run
from opengyre.config import to_toml
from test_run_live import assert_trained_once, events_of


def left_behind(folder: Path) -> list[list[str]]:
    """Processes that still work in ``folder``."""
    lines = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in " ".join(line)]


def wait_for_lines(child: subprocess.Popen[bytes], log: Path, lines: int) -> None:
    """Until the event log has so many lines, or the run has ended by itself."""
    while child.poll() is None and (not log.exists() or len(log.read_bytes().splitlines()) < lines):
        os.sched_yield()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_in_order_and_can_be_resumed(tmp_path: Path, number: signal.Signals) -> None:
    config = tiny_run.config(tmp_path, tiny_run.make_model(tmp_path / "model"), steps=3)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    run_dir = Path(config.run_dir)
    command = [sys.executable, "-m", "opengyre", "train", str(file)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for_lines(child, run_dir / "events.jsonl", 45)
    child.send_signal(number)
    assert child.stderr is not None
    assert child.stderr.read().decode() == "interrupted\n" and child.wait() == 130
    assert left_behind(tmp_path) == []
    assert events_of(run_dir, "run")[-1]["reason"] == "interrupted" and (run_dir / "report.html").exists()
    subprocess.run([*command[:4], str(run_dir), "--resume"], check=True, stdout=subprocess.DEVNULL, timeout=300)
    assert_trained_once(run_dir, config)


@pytest.mark.parametrize("seed", [1])
def test_o07_five_kills_lose_nothing_and_repeat_nothing(tmp_path: Path, seed: int) -> None:
    model = tiny_run.make_model(tmp_path / "model")
    config = tiny_run.config(tmp_path, model, steps=6, seed=seed)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    run_dir = Path(config.run_dir)
    command = [sys.executable, "-m", "opengyre", "train", str(file)]
    # Kill at points spread over the run's whole life: after so many more lines of the event log than at the start.
    log = run_dir / "events.jsonl"
    for life, more in enumerate([3, 40 + 17 * seed, 70, 25, 55 * seed]):
        begun = (run_dir / "config.toml").exists()
        start = len(log.read_bytes().splitlines()) if log.exists() else 0
        child = subprocess.Popen([*command, "--resume"] if begun else command, stdout=subprocess.DEVNULL)
        wait_for_lines(child, log, start + more)
        ended = child.poll()
        child.kill()
        child.wait()
        assert ended in (None, 0), f"life {life} failed by itself"
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL, timeout=300)
    assert_trained_once(run_dir, config)
    assert max(e["step"] for e in events_of(run_dir, "step")) == 6
    assert left_behind(tmp_path) == []
