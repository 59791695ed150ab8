"""Does it learn, and only when it may: ``python benchmarks/learning.py [--seeds 3]``.

The quickstart once per seed, then once with learning rate 0. Prints the held-out pass rate before and after, with the
points gained, and the wall-clock of each run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from opengyre.watch.events import read


def run(name: str, folder: Path, settings: list[str]) -> float:
    """One run; prints its line and returns the points gained."""
    run_dir = folder / name
    command = [sys.executable, "-m", "opengyre", "train", "quickstart", "--set", f"run_dir={run_dir}"]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    events = list(read(run_dir / "events.jsonl"))
    before, after = [e for e in events if e["kind"] == "eval"]
    steps = [e["pass_rate"] for e in events if e["kind"] == "step"]
    gained = 100 * (after["pass_rate"] - before["pass_rate"])
    curve = " ".join(f"{100 * rate:.0f}" for rate in steps)
    print(
        f"{name:<8} {100 * before['pass_rate']:5.1f} % -> {100 * after['pass_rate']:5.1f} %, {gained:+.1f} points"
        f" over {after['executions']} executions, {events[-1]['t']:.0f} s; training pass rate by step: {curve}",
        flush=True,
    )
    return gained


def main() -> None:
    """Run all seeds and the control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gains = [run(f"seed-{seed}", Path(folder), [f"seed={seed}", *args.set]) for seed in range(args.seeds)]
        control = run("lr-0", Path(folder), ["seed=0", "train.learning_rate=0.0", *args.set])
    print(f"least gain {min(gains):+.1f} points; with learning rate 0 {control:+.1f}")


if __name__ == "__main__":
    main()
