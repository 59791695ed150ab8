"""What a cap on trajectories per execution saves and costs: time, tokens and direction of a batch's gradient.

    python benchmarks/j_max.py [--tasks 6] [--group 8] [--repeat 2] [--record FOLDER]

Records a batch of branching executions: the quickstart's harness, as real processes behind the real proxy, with a
program in the policy's place that works in many turns, delegates to sub-agents (two at once, too), has its history
compacted again and again and ends when it likes; then selects with J = 1, 5 and without a cap and computes the batch's
gradient under the shipped policy, with the same advantages, packed as trees and as separate sequences. CPU seconds of
one thread, best of ``--repeat``, taking turns. The loss is the policy gradient at ratio 1: what GSPO's is when the
policy that is trained is the one that spoke.

``--record``: where the run folder goes, or one that is there already.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch

from opengyre.config import RunConfig, TrainConfig, build
from opengyre.executions.harness.quickstart import HARNESS_FILE
from opengyre.proxy.conversation import Message, Text, ToolCall
from opengyre.proxy.render import Renderer
from opengyre.quickstart import harness
from opengyre.quickstart.demonstrations import said
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store
from opengyre.rollout.program import ProgramEngine, Said
from opengyre.rollout.torch_model import load_model
from opengyre.run.collect import collect
from opengyre.run.preflight import prepare
from opengyre.samples.build import Member, build_group, pack_micro_steps, unique_tokens
from opengyre.samples.types import Sample
from opengyre.training.torch_trainer import TorchTrainer

POLICY = HARNESS_FILE.parent / "policy"
CAPS = {"1": 1, "5": 5, "none": sys.maxsize}
BUDGET, ROW = 8192, 1 << 17  # the defaults of a run
COMPACT_AT, MAX_TOKENS, MAX_TURNS = 1500, 200, 40
MAIN_ENDS, SUB_ENDS, DELEGATES = 0.03, 0.2, 0.08  # chances a turn
WORDS = ("fix", "test", "parse", "write", "check", "read", "loop", "line", "list", "error", "return", "module", "cache")

# Rewards differ within a group, as the work does.
EVALUATOR = """
import json, pathlib, sys
log = pathlib.Path(sys.argv[1], "log.txt")
reward = len(log.read_bytes().splitlines()) % 5 / 4 if log.exists() else 0.0
pathlib.Path(sys.argv[2]).write_text(json.dumps({"reward": reward, "checks": {}}))
"""


def speak(turns: Sequence[str], random: Random) -> Said:
    """The program in the policy's place: a long execution's shape, without its sense."""

    def words(low: int, high: int) -> str:
        return " ".join(random.choices(WORDS, k=random.randint(low, high)))

    def call(name: str, **arguments: str) -> ToolCall:
        return ToolCall("", name, arguments)

    if turns[-2].rstrip().endswith(harness.ASK_SUMMARY):
        return Said(words(30, 60))
    sub = harness.SUB_SYSTEM in turns[0]
    if random.random() < (SUB_ENDS if sub else MAIN_ENDS):
        return Said(words(10, 30))
    thought = Text(words(5, 25))
    if not sub and random.random() < DELEGATES:
        calls = [call("agent", task=words(8, 20)) for _ in range(random.randint(1, 2))]
    else:
        first = random.randint(100, 900)
        calls = [call("run", command=f"seq {first} {first + random.randint(3, 20)} | tee -a log.txt")]
    return Said(said(Message("assistant", (thought, *calls))))


def engine(config: RunConfig, renderer: Renderer) -> ProgramEngine:
    """For ``collect``."""
    return ProgramEngine(renderer, speak, seed=config.seed)


def record(folder: Path, tasks: int, group: int) -> None:
    """Run every task ``group`` times; the run folder is ``folder``."""
    place = folder.parent / f"{folder.name}-tasks"
    for split, count in (("train", tasks), ("held_out", 1)):
        for number in range(count):
            task = place / split / f"{split}-{number}"
            (task / "evaluator").mkdir(parents=True)
            (task / "evaluator" / "check.py").write_text(EVALUATOR)
            (task / "instruction.md").write_text(f"Keep the log of part {number}.")
            evaluator = json.dumps([sys.executable, "{task}/check.py", "{workspace}", "{reward}"])
            (task / "task.toml").write_text(f"evaluator = {evaluator}\n[deadlines]\nagent_s = 1800.0\n")
    limits = {"compact-at": COMPACT_AT, "max-tokens": MAX_TOKENS, "max-turns": MAX_TURNS}
    command = [sys.executable, "-I", "-S", str(HARNESS_FILE)]
    command += [word for name, value in limits.items() for word in (f"--{name}", str(value))]
    config = build(
        {
            "run_dir": str(folder),
            "model": {"path": str(POLICY), "context": 2048},
            "tasks": {"kind": "folder", "path": str(place)},
            "harness": {"kind": "command", "command": command},
            "sandbox": {"kind": "local"},
            "sampling": {"max_tokens": MAX_TOKENS},
            "watch": {"live": "off", "report": False},
        }
    )
    name = f"{Path(__file__).resolve()}:engine"
    collect(
        prepare(config, folder, resume=False),
        executions=group,
        engine=name,
        split="train",
        limit=None,
        say=lambda _: None,
    )


def groups(folder: Path) -> dict[str, list[Member]]:
    """The recorded executions of each task."""
    found: dict[str, list[Member]] = {}
    with Store.open(folder / "calls.db", readonly=True) as store:
        for execution in store.executions():
            tree, outcome = store.load_tree(execution.execution_id), execution.outcome or {}
            member = Member(execution.execution_id, tree, assign_roles(tree), outcome.get("reward"))
            found.setdefault(str(outcome.get("query_id")), []).append(member)
    return found


def select(found: dict[str, list[Member]], j_max: int) -> list[Sample]:
    return [s for query, members in found.items() for s in build_group(query, members, j_max=j_max).samples]


def gradient(trainer: TorchTrainer, samples: list[Sample], trees: bool) -> tuple[float, np.ndarray]:
    """(CPU seconds, the batch's whole gradient)."""
    trainer.forward.trees = trees
    steps = pack_micro_steps(samples, BUDGET, shared_prefix=trees, row=ROW if trees else None)
    start = time.process_time()
    for step in steps:
        trainer.micro_step(step)
    seconds = time.process_time() - start
    return seconds, np.concatenate([x.ravel() for x in trainer.take_gradients().values()]).astype(np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder: Path = options.record or Path(tempfile.mkdtemp(prefix="opengyre-j-max-")) / "run"
    if not (folder / "calls.db").exists():
        record(folder.absolute(), options.tasks, options.group)
    found = groups(folder)
    members = [member for each in found.values() for member in each]
    roles = Counter(role.value for member in members for role in member.roles.values())
    calls = sum(len(member.tree.calls()) for member in members)
    print(f"{len(members)} executions of {len(found)} tasks, {calls} calls; leaves: {dict(roles)}\n")

    trainer = TorchTrainer(
        load_model(POLICY, "cpu", torch.float32),
        TrainConfig(loss="reinforce", micro_step_tokens=BUDGET, row_tokens=ROW),
        core=False,
    )
    chosen = {name: select(found, j_max) for name, j_max in CAPS.items()}
    seconds: dict[tuple[str, bool], list[float]] = {}
    gradients: dict[tuple[str, bool], np.ndarray] = {}
    for _ in range(options.repeat):
        for name, samples in chosen.items():
            for trees in (True, False):
                took, gradients[name, trees] = gradient(trainer, samples, trees)
                seconds.setdefault((name, trees), []).append(took)
    best = {key: min(took) for key, took in seconds.items()}
    print("J     trajectories  trained tokens  all tokens  unique    tree s  of no cap  separate s  of no cap", end="")
    print("  separate/tree  cosine to no cap  norm/no cap")
    whole = gradients["none", True]
    for name, samples in chosen.items():
        by_execution: dict[str, list[Sample]] = {}
        for sample in samples:
            by_execution.setdefault(sample.execution_id, []).append(sample)
        unique = sum(unique_tokens(own) for own in by_execution.values())
        tree, separate, mine = best[name, True], best[name, False], gradients[name, True]
        norms = float(np.linalg.norm(mine)), float(np.linalg.norm(whole))
        print(
            f"{name:5} {len(samples):12} {sum(s.tokens for s in samples):15} {sum(len(s.ids) for s in samples):11}"
            f" {unique:7} {tree:9.2f} {tree / best['none', True]:10.1%} {separate:11.2f}"
            f" {separate / best['none', False]:10.1%} {separate / tree:14.2f}"
            f" {float(mine @ whole) / (norms[0] * norms[1]):17.3f} {norms[0] / norms[1]:12.2f}"
        )


if __name__ == "__main__":
    main()
