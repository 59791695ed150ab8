"""Selecting, building and packing the samples of many executions: seconds, and how they grow with their number.

    python benchmarks/samples.py [--executions 1000]

Executions are trees of 60 calls: a main line, two compactions, four sub-agents, retries; about 25k unique tokens each,
made of four patterns with their own tokens. The last column compares with keeping and packing every call's full prompt,
which is what a system without trees has to do.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / "unit")]

from opengyre.record.roles import assign_roles
from opengyre.record.tree import Tree
from opengyre.samples.build import Member, build_group, pack_micro_steps
from opengyre.training.pack import within_budget
from record_making import Talk
from tree_making import MAIN, SUB, grow, words

GROUP, BUDGET, PATTERNS = 16, 32768, 4


def execution(seed: int) -> Tree:
    """The tree of one execution."""
    rng, talk = random.Random(seed), Talk()
    system = words(rng, 2000)
    history = grow(talk, rng, [system, words(rng, 200)], 12, asked_tail="Fix the test", **MAIN)
    for _ in range(4):
        grow(talk, rng, [words(rng, 800), words(rng, 80)], rng.randint(3, 6), asked_tail="Find callers", **SUB)
    for _ in range(2):
        summary = words(rng, 240)
        talk.say([*history, words(rng, 40)], summary, asked_tail="Summarize the conversation so far", **MAIN)
        talk.say(history[:-2], words(rng, 60), delivered=False, asked_tail="Fix the test", **MAIN)  # a retry
        history = grow(talk, rng, [system, summary], 12, asked_tail="Fix the test", **MAIN)
    return talk.tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=1000)
    options = parser.parse_args()
    trees = [execution(seed) for seed in range(PATTERNS)]
    roles = [assign_roles(tree) for tree in trees]
    unique = sum(tree.unique_tokens for tree in trees) / PATTERNS
    full = sum(len(tree.rebuild(c.reply_node).ids) for tree in trees for c in tree.calls()) / PATTERNS
    print(f"a tree: {unique:,.0f} unique tokens, {len(trees[0].calls())} calls, {len(trees[0].leaves())} leaves")
    per_execution = {}
    for count in (options.executions // 4, options.executions // 2, options.executions):
        start = time.process_time()
        samples = []
        for first in range(0, count, GROUP):
            members = [
                Member(f"e{i}", trees[i % PATTERNS], roles[i % PATTERNS], float(i % 3 == 0))
                for i in range(first, min(first + GROUP, count))
            ]
            samples += build_group(f"q{first}", members).samples
        built = time.process_time()
        steps = pack_micro_steps(samples, BUDGET, shared_prefix=True, row=1 << 17)
        packed = time.process_time()
        rows = [pack for step in steps for pack in within_budget(step, BUDGET, 1 << 17)]
        done = time.process_time()
        per_execution[count] = (done - start) / count
        tokens = sum(len(row.ids) for row in rows)
        print(
            f"{count:5} executions: select and build {built - start:6.2f} s, micro-steps {packed - built:6.2f} s,"
            f" pack {done - packed:6.2f} s = {1000 * per_execution[count]:5.2f} ms each;"
            f" {len(samples)} samples, {len(steps)} micro-steps, {tokens / count:,.0f} tokens each,"
            f" full prompts {full * count / tokens:4.1f}x as many",
            flush=True,
        )
    growth = per_execution[options.executions] / per_execution[options.executions // 4]
    print(f"seconds an execution, {options.executions} against {options.executions // 4}: {growth:.2f}x")


if __name__ == "__main__":
    main()
