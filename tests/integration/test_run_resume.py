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


@pytest.mark.parametrize("seed", [1, 2])
def test_o07_five_kills_lose_nothing_and_repeat_nothing(tmp_path: Path, seed: int) -> None:
    model = tiny_run.make_model(tmp_path / "model")
    config = tiny_run.config(tmp_path, model, steps=6, seed=seed)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    run_dir = Path(config.run_dir)
    command = [sys.executable, "-m", "opengyre", "train", str(file)]
    # Kill at points spread over the run's whole life: after so many more lines of the event log than at the start.
    for life, more in enumerate([3, 40 + 17 * seed, 70, 25, 55 * seed]):
        child = subprocess.Popen(
            [*command, "--resume"] if (run_dir / "config.toml").exists() else command, stdout=subprocess.DEVNULL
        )
        log = run_dir / "events.jsonl"
        start = len(log.read_bytes().splitlines()) if log.exists() else 0
        while child.poll() is None and (not log.exists() or len(log.read_bytes().splitlines()) < start + more):
            os.sched_yield()
        ended = child.poll()
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert ended in (None, 0), f"life {life} failed by itself"
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL, timeout=300)
    assert_trained_once(run_dir, config)
    assert max(e["step"] for e in events_of(run_dir, "step")) == 6
    left = [p.cmdline() for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert left == []
