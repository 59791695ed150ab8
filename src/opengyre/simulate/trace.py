"""A recorded run as a workload: its executions as they went, and a cost model measured from its calls and events.

    events.jsonl ─▶ when executions, micro-steps, switches and commits were ─┬─▶ measure.py ─▶ CostModel, Host
    calls.db ─────▶ each call's tokens, start and end ───────────────────────┴─▶ Recorded: scripts by query number

What an execution does is taken from the record: tokens per call, tool time between calls, the evaluator's time. How
long the model takes is not: that follows from the cost model, the simulated batch, and who shares the machine. An
execution that the recorded run cut at its deadline is replayed as far as it came, with no deadline. Held-out executions
are left out.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from functools import cached_property
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
from opengyre.simulate.measure import Load, RecordedCall, RecordedMicroStep, costs
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
        self._calls: list[RecordedCall] = []
        self._moments: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for event in self.kinds["execution"]:
            if event.get("split") == "train":
                self._moments[event["execution"]][event["state"]] = event
        steps = self.kinds["step"]
        if not steps:
            raise RecordError("has no committed step", where=str(run_dir), right="a run with at least one")
        self._micro_tokens = [e["tokens"] for e in self.kinds["micro_step"] if e["state"] == "claimed"]
        if not self._micro_tokens:
            raise RecordError("trained nothing", where=str(run_dir), right="a run with at least one micro-step")
        self._picker = load_picker(self.config.samples.picker)
        self.source = Recorded(self._groups(), str(self.config.samples.j_max))
        micro_steps = self._micro_steps()
        pulls = [(e["cell"], e["t"] - e["seconds"], e["t"]) for e in self.kinds["pull"]]
        self.load = Load(self._calls, micro_steps, self._executions(), self._serving(), pulls)
        self.costs = costs(self._calls, micro_steps, self.load)
        self.wall_s = steps[-1]["t"] - self.kinds["query"][0]["t"]

    def workload(self) -> Workload:
        """The run as a workload."""
        config = self.config
        schedule, samples, cells = config.schedule, config.samples, config.cells
        settings = PolicySettings(train_cells=schedule.train_cells, carry_over=schedule.carry_over)
        return Workload(
            name=config.name,
            about=f"recorded run {self.run_dir}",
            cluster=Cluster(cells=cells.satellites + 1, slots=cells.slots, gpus_per_node=1, lost_at_h=self._lost[0]),
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
            cost=self.cost(),
            host=self.costs.host,
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
            self._calls.append(RecordedCall(meta.started_s, meta.ended_s, call.sampled_tokens, new, cell))
            context = call.prompt_tokens + call.sampled_tokens / 2
            head = tree.node(call.prompt_node)
            own = len(head) if head.call == call.index else 0  # the rest was there; the simulator loses it itself
            turns.append(Turn(max(1, call.sampled_tokens), min(new, own), context, max(0.0, then - meta.ended_s)))
        return Script(max(0.0, calls[0].meta.started_s - began), tuple(turns), max(0.0, done["t"] - scoring), 0.0)

    # --- costs

    def cost(self) -> CostModel:
        """What the run's cells took, measured."""
        measured = self.costs
        switches = {"rollout>train": self.config.schedule.switch_cost_s / 2}
        switches["train>rollout"] = switches["rollout>train"]
        for direction in switches:
            took = [e["total_s"] for e in self.kinds["switch"] if e["direction"] == direction and e.get("ok", True)]
            switches[direction] = statistics.median(took) if took else switches[direction]
        commit_s, publish_s = self._commit()
        _, restarts = self._lost
        pulls = self._alone_s([(e["t"] - e["seconds"], e["t"]) for e in self.kinds["pull"]])
        return CostModel(
            decode_base_s=max(measured.decode_base_s, 1 / _FAST),
            decode_call_s=measured.decode_call_s,
            prefill_tokens_per_s=1 / max(measured.prompt_s, 1 / _FAST),
            train_tokens_per_s=1 / max(measured.train_token_s, 1 / _FAST),
            micro_step_s=measured.micro_step_s,
            hand_over_s=self._hand_over(),
            commit_s=commit_s,
            publish_s=publish_s,
            pull_s=statistics.median(pulls) if pulls else 0.0,
            to_train_s=switches["rollout>train"],
            to_rollout_s=switches["train>rollout"],
            kv_tokens_per_s=_FAST,  # part of the switch
            restart_s=statistics.median(restarts) if restarts else CostModel().restart_s,
        )

    def _micro_steps(self) -> list[RecordedMicroStep]:
        tokens = {(e["step"], e["micro"]): e["tokens"] for e in self.kinds["micro_step"] if e["state"] == "claimed"}
        return [
            RecordedMicroStep(e["t"] - e["seconds"], e["t"], tokens.get((e["step"], e["micro"]), 0), e["cell"])
            for e in self.kinds["micro_step"]
            if e["state"] == "done"
        ]

    def _executions(self) -> list[tuple[float, float]]:
        """From their start until they were scored."""
        moments = self._moments.values()
        return [(m["running"]["t"], m["done"]["t"]) for m in moments if "running" in m and "done" in m]

    def _serving(self) -> list[tuple[float, bool]]:
        """When it changed whether a cell serves."""
        serving: set[str] = set()
        out = []
        for event in self.kinds["cell"]:
            (serving.add if event["state"] == CellState.ROLLOUT else serving.discard)(event["cell"])
            out.append((event["t"], bool(serving)))
        return out

    def _alone_s(self, spans: list[tuple[float, float]]) -> list[float]:
        """What a cell alone takes for what was done in each."""
        starts, ends = np.array(spans, dtype=np.float64).reshape(-1, 2).T
        return list(map(float, self.load.alone_s(self.costs.host, starts, ends)))

    @cached_property
    def _lost(self) -> tuple[dict[str, list[float]], list[float]]:
        """Hours at which cells were lost, and the seconds until each had a role again."""
        began = self.kinds["query"][0]["t"]
        hours: dict[str, list[float]] = {}
        since: dict[str, float] = {}
        restarts = []
        for event in self.kinds["cell"]:
            cell, state = event["cell"], CellState(event["state"])
            if state is CellState.DEAD and event["t"] >= began:
                hours.setdefault(cell, []).append((event["t"] - began) / 3600)
                since[cell] = event["t"]
            elif state.stable and cell in since:
                restarts.append(event["t"] - since.pop(cell))
        return hours, restarts

    def _hand_over(self) -> float:
        """From the last micro-step of a satellite's sum until that is in the core's."""
        cores = {c["cell"] for e in self.kinds["run"] for c in e.get("cells", ()) if c["core"]}
        done: dict[tuple[int, int], float] = {}
        waits: list[tuple[float, float]] = []
        for event in self.kinds["micro_step"]:  # one whose sum was lost is done again
            key = event["step"], event["micro"]
            if event["state"] == "done":
                done[key] = event["t"]
            elif event["state"] == "pushed" and event["cell"] not in cores and key in done:
                waits.append((done[key], event["t"]))
        return min(self._alone_s(waits), default=0.0)  # the others waited for more micro-steps

    def _commit(self) -> tuple[float, float]:
        """From the last counted micro-step to the step, and from the step to the next admission: medians."""
        commits: list[tuple[float, float]] = []
        publishes: list[tuple[float, float]] = []
        admissions = [e["t"] for e in self.kinds["query"] if e["state"] == "admitted"]
        for step in self.kinds["step"]:
            pushed = [e["t"] for e in self.kinds["micro_step"] if e["step"] == step["step"] and e["state"] == "pushed"]
            if pushed:
                commits.append((max(pushed), step["t"]))
            after = next((t for t in admissions if t > step["t"]), None)
            if after is not None:
                publishes.append((step["t"], after))
        commit_s, publish_s = (
            statistics.median(self._alone_s(spans)) if spans else 0.0 for spans in (commits, publishes)
        )
        return commit_s, publish_s
