"""A recorded run as a workload: its executions as they went, and a cost model measured from its calls and events.

    events.jsonl ─▶ when executions, micro-steps, switches and commits were ─┬─▶ CostModel, Workload
    calls.db ─────▶ each call's tokens, start and end ───────────────────────┴─▶ Recorded: scripts by query number

What an execution does is taken from the record: tokens per call, tool time between calls, the evaluator's time. How
long the model takes is not: that follows from the cost model and the simulated batch. An execution that the recorded
run cut at its deadline is replayed as far as it came, with no deadline. Held-out executions are left out.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from opengyre.cells.state import CellState
from opengyre.config import RunConfig, load
from opengyre.errors import RecordError
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store
from opengyre.record.tree import Tree
from opengyre.samples.select import Key, load_picker, paths_of, select
from opengyre.simulate.cost import CostModel
from opengyre.simulate.script import Script, Turn
from opengyre.simulate.workload import Cluster, Executions, PolicySettings, Run, Training, Workload
from opengyre.watch import events as log

UNLIMITED = "unlimited"  # as J_max
_FAST = 1e9  # tokens per second of what was too quick to be measured


class Played(NamedTuple):
    """A recorded execution: its script, and the tokens that its training runs over with one trajectory, with two, …"""

    script: Script
    by_j: tuple[float, ...] = ()

    def with_j(self, j_max: int | None) -> Script:
        """The script with at most so many trajectories; None: with all."""
        return self.script._replace(train_tokens=self.by_j[:j_max][-1] if self.by_j else 0.0)


class Recorded:
    """Scripts of a recorded run, in its admission order; beyond its last query it starts over."""

    def __init__(self, groups: list[list[Played]], j_max: str, seed: int = 0) -> None:
        self._groups, self.j_max, self.seed = groups, j_max, seed
        most = None if j_max == UNLIMITED else int(j_max)
        self._scripts = [[one.with_j(most) for one in group] for group in groups]
        turns = [turn for group in self._scripts for script in group for turn in script.turns]
        tokens = sum(turn.tokens for turn in turns) or 1.0
        self.mean_context = sum(turn.context * turn.tokens for turn in turns) / tokens

    def query(self, number: int) -> list[Script]:
        """The executions of one query."""
        return self._scripts[number % len(self._scripts)]

    def drawn(self, workload: Workload, seed: int | None) -> Recorded:
        """With the J_max of a workload, as many queries drawn from these with replacement; seed None or 0: as they
        are."""
        groups = random.Random(seed).choices(self._groups, k=len(self._groups)) if seed else self._groups
        return Recorded(groups, workload.training.j_max or self.j_max, seed or 0)

    def by_j_max(self) -> dict[str, float]:
        """J_max -> training tokens of all executions, relative to the J_max that is played."""
        most = max((len(one.by_j) for group in self._groups for one in group), default=0)
        own = sum(script.train_tokens for group in self._scripts for script in group) or 1.0
        sums = {
            str(j): sum(one.with_j(j).train_tokens for group in self._groups for one in group) / own
            for j in range(1, most + 1)
        }
        if not sums:
            return {}
        return {**sums, self.j_max: 1.0, UNLIMITED: sums[str(most)]}


class Trace:
    """One run folder, read. ``wall_s``: from the first admitted query to the last committed step."""

    def __init__(self, run_dir: Path) -> None:
        if not (run_dir / "events.jsonl").exists():
            raise RecordError("has no events.jsonl", where=str(run_dir), right="the folder of a training run")
        self.run_dir = run_dir
        self.config: RunConfig = load(run_dir / "config.toml", [])
        self.kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in log.read(run_dir / "events.jsonl"):
            self.kinds[event["kind"]].append(event)
        self._calls: list[tuple[float, float, float, float, str]] = []  # start, end, sampled, new prompt, cell
        self._moments: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for event in self.kinds["execution"]:
            if event.get("split") == "train":
                self._moments[event["execution"]][event["state"]] = event
        steps = self.kinds["step"]
        if not steps:
            raise RecordError("has no committed step", where=str(run_dir), right="a run with at least one")
        self._micro_tokens = [e["tokens"] for e in self.kinds["micro_step"] if e["state"] == "claimed"]
        self._picker = load_picker(self.config.samples.picker)
        groups = self._groups()
        self._call_s, *self._decoding = self._decode()
        self.source = Recorded(
            [[self._later(one) for one in group] for group in groups], str(self.config.samples.j_max)
        )
        self.wall_s = steps[-1]["t"] - self.kinds["query"][0]["t"]

    def workload(self) -> Workload:
        """The run as a workload."""
        config = self.config
        schedule, samples, cells = config.schedule, config.samples, config.cells
        settings = PolicySettings(train_cells=schedule.train_cells, carry_over=schedule.carry_over)
        cost = self.cost()
        return Workload(
            name=config.name,
            about=f"recorded run {self.run_dir}",
            cluster=Cluster(cells=cells.satellites + 1, slots=cells.slots, gpus_per_node=1),
            run=Run(
                steps=len(self.kinds["step"]),
                queries_per_step=samples.queries_per_step,
                group_size=samples.group_size,
                max_staleness=schedule.max_staleness,
                cooldown_s=schedule.cooldown_s,
                tick_s=0.0,
            ),
            executions=Executions(context=self.source.mean_context),
            training=Training(
                micro_step_tokens=statistics.fmean(self._micro_tokens),
                flush_every=config.train.flush_every,
                by_j_max=self.source.by_j_max(),
                j_max=self.source.j_max,
            ),
            cost=cost,
            policies=dict.fromkeys(("async", "lend", "colocate", schedule.policy), settings),
        )

    # --- executions

    def _groups(self) -> list[list[Played]]:
        queries: dict[str, set[str]] = defaultdict(set)  # by state, in order of their admission
        admitted = [e["query"] for e in self.kinds["query"] if e["state"] == "admitted"]
        for event in self.kinds["query"]:
            queries[event["state"]].add(event["query"])
        members: dict[str, list[Played]] = defaultdict(list)
        with Store.open(self.run_dir / "calls.db", readonly=True) as store:
            outcomes = {e.execution_id: e.outcome or {} for e in store.executions()}
            for execution, moments in self._moments.items():
                if "done" in moments and moments["done"].get("calls") and execution in outcomes:
                    query, tree = moments["done"]["query"], store.load_tree(execution, verify=False)
                    counts = query not in queries["complete"] or outcomes[execution].get("samples")
                    by_j = self._by_j(execution, tree) if counts else ()  # a group that is all alike trains nothing
                    members[query].append(Played(self._script(moments, tree), by_j))
        groups = [members[query] for query in dict.fromkeys(admitted) if members[query]]
        if not groups:
            raise RecordError("has no finished execution", where=str(self.run_dir), right="a run that got further")
        trained = [one.by_j[: self.config.samples.j_max][-1:] for q in queries["trained"] for one in members[q]]
        share = sum(self._micro_tokens) / (sum(map(sum, trained)) or 1)  # packing computes some tokens twice
        return [[one._replace(by_j=tuple(share * t for t in one.by_j)) for one in group] for group in groups]

    def _by_j(self, execution: str, tree: Tree) -> tuple[float, ...]:
        """Distinct tokens on the paths that would be trained: on the first drawn, on the first two, …"""
        picks = select(
            paths_of(tree, assign_roles(tree)),
            j_max=len(tree.leaves()),
            run_seed=self.config.seed,
            execution_id=execution,
            picker=self._picker,
        )
        known: set[Key] = set()
        sums = []
        for pick in picks:
            known |= {segment.key for segment in pick.path.segments}
            sums.append(float(sum(stop - start for _, start, stop in known)))
        return tuple(sums)

    def _script(self, moments: dict[str, dict[str, Any]], tree: Tree) -> Script:
        done, calls = moments["done"], sorted(tree.calls(), key=lambda call: call.meta.started_s)
        began = moments.get("running", done)["t"]
        scoring = moments.get("scoring", done)["t"]
        turns = []
        for call, after in zip(calls, [*calls[1:], None], strict=True):
            meta = call.meta
            then = after.meta.started_s if after is not None else scoring
            new = max(0, call.prompt_tokens - meta.cached_tokens)
            spans = tree.node(call.reply_node).spans if call.reply_node is not None else ()
            cell = next((span.cell for span in spans if span.cell), "")
            self._calls.append((meta.started_s, meta.ended_s, call.sampled_tokens, new, cell))
            context = call.prompt_tokens + call.sampled_tokens / 2
            turns.append(Turn(max(1, call.sampled_tokens), new, context, max(0.0, then - meta.ended_s)))
        return Script(max(0.0, calls[0].meta.started_s - began), tuple(turns), max(0.0, done["t"] - scoring), 0.0)

    def _later(self, played: Played) -> Played:
        """What a call takes besides its engine's time, counted with the tools: no other call waits for it."""
        turns = tuple(turn._replace(tool_s=turn.tool_s + self._call_s) for turn in played.script.turns)
        return played._replace(script=played.script._replace(turns=turns))

    # --- costs

    def cost(self) -> CostModel:
        """What the run's cells took, measured."""
        base_s, call_s, prompt_s = self._decoding
        fixed_s, token_s = self._training()
        switches = {"rollout>train": self.config.schedule.switch_cost_s / 2}
        switches["train>rollout"] = switches["rollout>train"]
        for direction in switches:
            took = [e["total_s"] for e in self.kinds["switch"] if e["direction"] == direction and e.get("ok", True)]
            switches[direction] = statistics.median(took) if took else switches[direction]
        commit_s, publish_s = self._commit()
        return CostModel(
            decode_base_s=max(base_s, 1 / _FAST),
            decode_call_s=call_s,
            prefill_tokens_per_s=1 / prompt_s if prompt_s > 1 / _FAST else _FAST,
            train_tokens_per_s=1 / token_s if token_s > 1 / _FAST else _FAST,
            micro_step_s=fixed_s,
            hand_over_s=self._hand_over(),
            commit_s=commit_s,
            publish_s=publish_s,
            pull_s=0.0,  # part of what calls took
            to_train_s=switches["rollout>train"],
            to_rollout_s=switches["train>rollout"],
            kv_tokens_per_s=_FAST,  # part of the switch
        )

    def _decode(self) -> list[float]:
        """Least squares over the calls: seconds = fixed + tokens (base + per call x calls beside it) + per token x
        prompts that its cell took in meanwhile, its own among them. But for the first, the same terms as in serving.py;
        the fixed part is rendering, the wire, and waiting for a free core."""
        calls = np.array([c[:4] for c in self._calls], dtype=np.float64)
        cells = np.array([c[4] for c in self._calls])
        start, end, tokens, prompt = calls.T
        beside, taken_in = np.zeros(len(calls)), np.zeros(len(calls))
        for cell in np.unique(cells):
            at = np.flatnonzero(cells == cell)
            s, e = start[at], end[at]
            beside[at] = _mean_level(s, e)
            order = np.argsort(s)
            so_far = np.concatenate([[0.0], np.cumsum(prompt[at][order])])
            first, last = np.searchsorted(s[order], s, side="left"), np.searchsorted(s[order], e, side="right")
            taken_in[at] = so_far[last] - so_far[first]
        columns = np.stack([np.ones(len(calls)), tokens, tokens * beside, taken_in], axis=1)
        return _non_negative(columns, end - start - self._held_s(start, end))

    def _held_s(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Seconds of each interval in which no cell served: colocate trains, and calls wait."""
        serving: set[str] = set()
        moments, none = [0.0], [1.0]  # from each moment on: 1 where nobody serves
        for event in self.kinds["cell"]:
            (serving.add if event["state"] == CellState.ROLLOUT else serving.discard)(event["cell"])
            moments.append(event["t"])
            none.append(float(not serving))
        held = np.concatenate([[0.0], np.cumsum(np.array(none)[:-1] * np.diff(moments))])
        held_s: np.ndarray = np.interp(end, moments, held) - np.interp(start, moments, held)
        return held_s

    def _training(self) -> tuple[float, float]:
        """Micro-step seconds = fixed + tokens x per token."""
        claimed = {(e["step"], e["micro"]): e["tokens"] for e in self.kinds["micro_step"] if e["state"] == "claimed"}
        done = [e for e in self.kinds["micro_step"] if e["state"] == "done"]
        tokens = np.array([claimed.get((e["step"], e["micro"]), 0) for e in done], dtype=np.float64)
        seconds = np.array([e["seconds"] for e in done], dtype=np.float64)
        fixed_s, token_s = _non_negative(np.stack([np.ones(len(done)), tokens], axis=1), seconds)
        return fixed_s, token_s

    def _hand_over(self) -> float:
        done = {(e["step"], e["micro"]): e["t"] for e in self.kinds["micro_step"] if e["state"] == "done"}
        pushed = [e for e in self.kinds["micro_step"] if e["state"] == "pushed"]
        cores = {c["cell"] for e in self.kinds["run"] for c in e.get("cells", ()) if c["core"]}
        waits = [e["t"] - done.get((e["step"], e["micro"]), e["t"]) for e in pushed if e["cell"] not in cores]
        return min(waits, default=0.0)  # the last of a hand-over waited for nothing else

    def _commit(self) -> tuple[float, float]:
        """From the last counted micro-step to the step, and from the step to the next admission: medians."""
        commits, publishes = [], []
        admissions = [e["t"] for e in self.kinds["query"] if e["state"] == "admitted"]
        for step in self.kinds["step"]:
            pushed = [e["t"] for e in self.kinds["micro_step"] if e["step"] == step["step"] and e["state"] == "pushed"]
            if pushed:
                commits.append(step["t"] - max(pushed))
            after = next((t for t in admissions if t > step["t"]), None)
            if after is not None:
                publishes.append(after - step["t"])
        return (statistics.median(commits) if commits else 0.0, statistics.median(publishes) if publishes else 0.0)


def _mean_level(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How many of the intervals were open, on average over each of them, itself included."""
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    moments = times[order]
    level = np.cumsum(np.where(order < len(start), 1, -1))
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(moments))])
    whole = np.interp(end, moments, area) - np.interp(start, moments, area)
    level_mean: np.ndarray = whole / np.maximum(1e-6, end - start)
    return level_mean


def _non_negative(columns: np.ndarray, target: np.ndarray) -> list[float]:
    """Least squares with coefficients of at least 0: columns that would get less are left out, worst first."""
    used: list[int] = list(range(columns.shape[1]))
    while used:
        found, *_ = np.linalg.lstsq(columns[:, used], target, rcond=None)
        if (found >= 0).all():
            out = [0.0] * columns.shape[1]
            for place, value in zip(used, found.tolist(), strict=True):
                out[place] = value
            return out
        used.pop(int(np.argmin(found)))
    return [0.0] * columns.shape[1]
