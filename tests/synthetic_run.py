"""Events of a run that never took place, with the habits of a real one: long tails, role switches, failures.

    burst ──▶ queue ──▶ running (slots x rollout cells) ──▶ group complete ──▶ micro-steps ──▶ step ──▶ next burst
                              satellites flip to training when the tail leaves their slots empty, and back

A small discrete-event simulation on a heap; ``python tests/synthetic_run.py DIR`` writes ``events.jsonl`` and a report.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

Event = dict[str, Any]
FLIP = {"train": "rollout>train", "rollout": "train>rollout"}
PHASES = {
    "train": {"drain_s": 0.18, "move_kv_s": 0.11, "release_s": 0.06, "build_s": 0.42},
    "rollout": {"flush_s": 0.05, "release_s": 0.06, "pull_s": 0.17, "build_s": 0.12},
}


class Synthetic:
    """One simulated run; ``events`` is its log."""

    def __init__(
        self,
        *,
        steps: int = 12,
        satellites: int = 3,
        slots: int = 8,
        queries: int = 4,
        group: int = 8,
        median_s: float = 9.0,
        skill: tuple[float, float] = (0.32, 0.82),
        learning_rate: float = 1e-3,
        seed: int = 0,
        held_out: tuple[int, int] = (24, 4),
        policy: str = "elastic",
    ) -> None:
        self.rng = random.Random(seed)
        self.steps, self.slots, self.queries, self.group = steps, slots, queries, group
        self.median_s, self.skill, self.held_out = median_s, skill, held_out
        self.events: list[Event] = []
        self.t, self._order = 0.0, 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self.cells = dict.fromkeys(["core", *(f"cell-{i}" for i in range(1, satellites + 1))], "starting")
        self.queue: deque[tuple[str, str, str, int]] = deque()
        self.running = 0
        self.version, self.bursts, self.last_step = 0, 0, 0.0
        self.groups: dict[str, list[Event]] = {}
        self.claimable: list[tuple[int, int]] = []  # heap: the oldest burst first
        self.open: dict[int, Counter[str]] = {}
        self.step_rows: dict[int, list[Event]] = {}
        self.idle_trainers: set[str] = set()
        self.eval_rewards: list[float] = []
        self._last_level = (-1, -1, -1)
        cells = [{"cell": c, "core": c == "core"} for c in self.cells]
        fields = {"name": "quickstart", "policy": policy, "steps": steps, "seed": seed, "learning_rate": learning_rate}
        self.emit("run", state="start", cells=cells, **fields)
        for cell in self.cells:
            self.emit("cell", cell=cell, state="starting", reason="run start", pid=4000 + len(cell))
            self.after(self.rng.uniform(1.2, 2.4), self.booted, cell)

    # -- machinery -------------------------------------------------------------------------------------------------

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"t": round(self.t, 4), "kind": kind, **fields})

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.t + seconds, self._order, lambda: call(*args)))

    def run(self) -> list[Event]:
        while self._heap:
            self.t, _, call = heapq.heappop(self._heap)
            call()
            self.level()
        self.emit("run", state="end", reason="all steps done")
        return self.events

    @property
    def rollouts(self) -> int:
        return sum(role == "rollout" for role in self.cells.values())

    def level(self) -> None:
        now = (len(self.queue), self.running, self.rollouts)
        if now != self._last_level:
            self._last_level = now
            self.emit("waterlevel", queued=now[0], running=now[1], rollout_cells=now[2], slots=self.slots)

    # -- executions ------------------------------------------------------------------------------------------------

    def booted(self, cell: str) -> None:
        role = "train" if cell == "core" else "rollout"
        self.cells[cell] = role
        self.emit("cell", cell=cell, state=role, reason="ready", version=0)
        self.idle_trainers |= {cell} & {"core"}
        if "starting" not in self.cells.values():
            self.evaluate()
        self.start()

    def evaluate(self) -> None:
        self.eval_rewards = []
        tasks, each = self.held_out
        for i in range(tasks * each):
            self.enqueue(f"h{self.version}-{i}", f"h{self.version}-{i // each}", f"held-{i // each:02d}", -1)
        if not tasks:
            self.evaluated()

    def enqueue(self, execution: str, query: str, task: str, burst: int) -> None:
        self.queue.append((execution, query, task, burst))
        split = "train" if burst >= 0 else "held_out"
        self.emit("execution", execution=execution, query=query, task=task, split=split, state="queued")

    def admit(self) -> None:
        while self.bursts < min(self.steps, self.version + 2):
            burst, self.bursts = self.bursts, self.bursts + 1
            self.open[burst], self.step_rows[burst] = Counter(), []
            for q in range(self.queries):
                query, task = f"q{burst}-{q}", f"train-{(burst * self.queries + q) % 37:02d}"
                self.emit("query", query=query, task=task, state="admitted", version=self.version, step=burst + 1)
                self.groups[query] = []
                for i in range(self.group):
                    self.enqueue(f"{query}-{i}", query, task, burst)
        self.start()

    def start(self) -> None:
        while self.queue and self.running < self.rollouts * self.slots:
            item = self.queue.popleft()
            self.running += 1
            split = "train" if item[3] >= 0 else "held_out"
            names = {"execution": item[0], "query": item[1], "task": item[2], "split": split}
            self.emit("execution", state="running", **names)
            seconds = min(self.rng.lognormvariate(0, 0.75) * self.median_s, 6 * self.median_s)
            self.after(seconds, self.finish, item, names, seconds)
        self.flip()

    def finish(self, item: tuple[str, str, str, int], names: dict[str, str], seconds: float) -> None:
        self.running -= 1
        low, high = self.skill
        skill = low + (high - low) * (self.version / max(1, self.steps)) ** 0.8
        hard = 0.5 + 0.5 * random.Random(item[2]).random()
        outcome = "timed_out" if seconds >= 6 * self.median_s else "finished"
        if item[3] >= 0:
            outcome = self.rng.choices([outcome, "infra_abort", "evaluator_failed"], [0.97, 0.02, 0.01])[0]
        scored = outcome in ("finished", "timed_out")
        passed = self.rng.random() < skill * (1.25 - 0.5 * hard) and outcome == "finished"
        reward = (1.0 if passed else round(self.rng.choice([0.0, 0.0, 0.25, 0.5, 0.75]), 2)) if scored else None
        leaves = {"main": 1, "main_summary": int(seconds > 15), "sub_agent": self.rng.randrange(3)}
        tokens = int(seconds * self.rng.uniform(55, 75))
        done: Event = {
            "outcome": outcome,
            "reward": reward,
            "calls": 2 + int(seconds / 1.7),
            "moves": self.rng.choice([0, 0, 1]),
        }
        done |= {"sampled_tokens": tokens, "prompt_tokens": tokens * 4, "leaves": leaves, "agent_s": seconds}
        self.emit("execution", state="done", **names, **done, held_s=0.0, queued_s=1.0, score_s=0.2)
        if item[3] >= 0:
            self.groups[item[1]].append(done)
            if len(self.groups[item[1]]) == self.group:
                self.complete(item[1], item[2], item[3])
        else:
            self.eval_rewards.append(reward or 0.0)
            if len(self.eval_rewards) == self.held_out[0] * self.held_out[1]:
                self.evaluated()
        self.start()

    def evaluated(self) -> None:
        rewards = self.eval_rewards or [0.0]
        rates = {"pass_rate": sum(r == 1 for r in rewards) / len(rewards), "reward_mean": sum(rewards) / len(rewards)}
        if self.eval_rewards:
            self.emit("eval", version=self.version, executions=len(rewards), tasks=self.held_out[0], **rates)
        self.last_step = self.last_step or self.t
        if self.version < self.steps:
            self.admit()

    # -- training --------------------------------------------------------------------------------------------------

    def complete(self, query: str, task: str, burst: int) -> None:
        self.emit("query", query=query, task=task, state="complete", version=self.version, step=burst + 1)
        self.step_rows[burst] += self.groups[query]
        for _ in range(3):
            heapq.heappush(self.claimable, (burst, self.open[burst]["ready"]))
            self.open[burst]["ready"] += 1
        self.claim()

    def claim(self) -> None:
        for cell in sorted(self.idle_trainers, key=lambda c: c != "core"):
            if not self.claimable or self.claimable[0][0] != self.version:
                break
            burst, micro = heapq.heappop(self.claimable)
            self.idle_trainers.discard(cell)
            self.emit("micro_step", step=burst + 1, micro=micro, cell=cell, state="claimed", tokens=0, seconds=0.0)
            self.after(self.rng.uniform(1.4, 2.6), self.trained, cell, burst, micro)
        self.flip()

    def trained(self, cell: str, burst: int, micro: int) -> None:
        tokens = self.rng.randint(5000, 8192)
        self.emit("micro_step", step=burst + 1, micro=micro, cell=cell, state="done", tokens=tokens, seconds=2.0)
        self.idle_trainers.add(cell)
        self.open[burst]["done"] += 1
        if self.open[burst]["done"] == 3 * self.queries:
            self.after(0.35, self.commit, burst)
        self.claim()

    def commit(self, burst: int) -> None:
        rows, k = self.step_rows.pop(burst), burst + 1
        rewards = [r["reward"] for r in rows if r["reward"] is not None]
        self.version = k
        mean = sum(rewards) / max(1, len(rewards))
        figures = {
            "loss": round(self.rng.gauss(-0.012, 0.01), 5),
            "grad_norm": round(self.rng.lognormvariate(-0.3, 0.35), 4),
            "reward_mean": mean,
            "pass_rate": sum(r == 1 for r in rewards) / max(1, len(rewards)),
            "ratio_max": 1 + self.rng.random() * 4e-3,
            "clip_fraction": self.rng.uniform(0.05, 0.22),
        }
        counts = {"executions": len(rewards), "groups": self.queries, "degenerate": self.rng.choice([0, 0, 0, 1])}
        counts |= {
            "excluded": len(rows) - len(rewards),
            "samples": int(1.7 * len(rows)),
            "staleness_max": min(1, burst),
        }
        counts["tokens"] = sum(r["sampled_tokens"] for r in rows)
        times = {"seconds": 0.35, "step_s": self.t - self.last_step}
        self.last_step = self.t
        self.emit("step", step=k, version=k, **figures, **counts, **times)
        if k == self.steps:
            self.evaluate()
        else:
            self.admit()
        self.claim()

    # -- cells -----------------------------------------------------------------------------------------------------

    def flip(self) -> None:
        level = len(self.queue) + self.running
        for cell, role in list(self.cells.items()):
            if cell == "core" or role not in FLIP:
                continue
            ready = self.claimable and self.claimable[0][0] == self.version
            if role == "rollout" and ready and level <= (self.rollouts - 1) * self.slots and self.rollouts > 1:
                self.switch(cell, "train", "slots not needed")
            elif role == "train" and self.queue and cell in self.idle_trainers:
                self.switch(cell, "rollout", "queries admitted")

    def switch(self, cell: str, role: str, reason: str) -> None:
        self.emit("decision", policy="elastic", actions=[{"cell": cell, "role": role}], reason=reason, snapshot={})
        self.idle_trainers.discard(cell)
        self.cells[cell] = "switching"
        first = "draining" if role == "train" else "leaving"
        self.emit("cell", cell=cell, state=first, reason=reason, version=self.version)
        phases = {k: round(v * self.rng.lognormvariate(0, 0.25), 4) for k, v in PHASES[role].items()}
        self.after(sum(phases.values()), self.switched, cell, role, phases)

    def switched(self, cell: str, role: str, phases: dict[str, float]) -> None:
        self.cells[cell] = role
        self.emit("cell", cell=cell, state=role, reason="switched", version=self.version)
        moved = self.rng.randint(0, 4) if role == "train" else 0
        figures = {"phases": phases, "total_s": sum(phases.values()), "moved_calls": moved, "kv_tokens": moved * 1800}
        self.emit("switch", cell=cell, direction=FLIP[role], ok=True, **figures)
        if role == "train":
            self.idle_trainers.add(cell)
            self.claim()
        else:
            self.start()


def write(run_dir: Path, events: list[Event]) -> Path:
    """Write ``events`` as a run folder's log."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "events.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in events))
    return path
