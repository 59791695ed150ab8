"""Does unmodified Claude Code's policy learn: ``python benchmarks/claude_code_learning.py --policy DIR --tasks DIR``.

``examples/claude_code/bare.toml`` once per seed and once with learning rate 0, from the same warm-started policy (see
examples/claude_code/README.md). Prints the held-out pass rate and mean reward before and after with the executions
counted, the training pass rate by step, and the wall-clock of each run. Needs Claude Code 2.1.220.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from opengyre.watch.events import read

CONFIG = Path(__file__).parents[1] / "examples" / "claude_code" / "bare.toml"


def run(name: str, run_dir: Path, settings: list[str], config: Path) -> float:
    """One run (or the folder of one that is over); prints its line and returns the points of pass rate gained."""
    if not (run_dir / "report.html").exists():
        command = [sys.executable, "-m", "opengyre", "train", str(config), "--set", f"run_dir='{run_dir}'"]
        for setting in settings:
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    events = list(read(run_dir / "events.jsonl"))
    before, after = [e for e in events if e["kind"] == "eval"]
    steps = [e for e in events if e["kind"] == "step"]
    gained = 100 * (after["pass_rate"] - before["pass_rate"])
    trained = sum(e["executions"] for e in steps)
    curve = " ".join(f"{100 * e['pass_rate']:.0f}" for e in steps)
    print(
        f"{name:<8} pass rate {100 * before['pass_rate']:5.1f} % -> {100 * after['pass_rate']:5.1f} % ({gained:+.1f}),"
        f" mean reward {before['reward_mean']:.2f} -> {after['reward_mean']:.2f} over {after['executions']} held-out"
        f" executions; {trained} trained executions, {events[-1]['t']:.0f} s; training pass rate by step: {curve}",
        flush=True,
    )
    return gained


def main() -> None:
    """Run all seeds and the control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path("runs/claude-code/policy"))
    parser.add_argument("--tasks", type=Path, default=Path("runs/claude-code/tasks"))
    parser.add_argument("--out", type=Path, default=Path("runs/claude-code/learning"), help="folder of the runs")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--no-control", action="store_true", help="leave the run with learning rate 0 out")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    args = parser.parse_args()
    settings = [f"model.path='{args.policy.absolute()}'", f"tasks.path='{args.tasks.absolute()}'", *args.set]
    out: Path = args.out.absolute()
    gains = [run(f"seed-{s}", out / f"seed-{s}", [*settings, f"seed={s}"], args.config) for s in args.seeds]
    if not args.no_control:
        gain = run("lr-0", out / "lr-0", [*settings, "seed=0", "train.learning_rate=0.0"], args.config)
        print(f"with learning rate 0: {gain:+.1f} points")
    if gains:
        print(f"least gain {min(gains):+.1f} points")


if __name__ == "__main__":
    main()
