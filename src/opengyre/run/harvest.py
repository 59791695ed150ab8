"""From executions that are over to samples: trees are read, roles named, paths chosen, advantages taken.

execution over ─▶ finished(): roles, figures, journal
group complete ─▶ group():    advantage ─▶ selection ─▶ samples ─▶ micro-steps; then the trees leave memory
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from opengyre.config import RunConfig
from opengyre.executions.outcome import ExecutionResult, Outcome
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store
from opengyre.record.tree import Tree
from opengyre.record.types import Role
from opengyre.samples.build import GroupSamples, Member, build_group
from opengyre.samples.select import load_picker
from opengyre.samples.types import Sample
from opengyre.watch.tree_json import trained_masks, tree_to_json

_KEEP_TREES = 3  # drawn in the report: the ones with the most roles
_PREFER_TRAINED = 0.5  # among equals, a tree that was trained shows more


class Harvest:
    """Turns finished executions into samples and into what the report shows of them."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        trees: Callable[[str], Tree | None],
        run_dir: Path,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._config, self._store, self._trees = config, store, trees
        self._decode = decode
        self._picker = load_picker(config.samples.picker)
        self._folder = run_dir / "trees"
        self._shown: dict[str, float] = {}

    def reward(self, result: ExecutionResult) -> float | None:
        """What an execution counts as: its reward; or 0, only if so configured, when infrastructure lost it before the
        agent could act. An evaluator's failure is never a number."""
        placeholder = self._config.samples.infra_placeholder
        lost_at_start = result.outcome is Outcome.INFRA_ABORT and result.calls == 0
        return 0.0 if placeholder and lost_at_start else result.reward

    def figures(self, execution_id: str) -> dict[str, Any]:
        """What the event log says about a finished execution: leaves by role, tokens, moves."""
        tree = self._tree(execution_id)
        calls = tree.calls()
        return {
            "leaves": Counter(role.value for role in assign_roles(tree).values()),
            "sampled_tokens": sum(call.sampled_tokens for call in calls),
            "prompt_tokens": sum(call.prompt_tokens for call in calls),
            "unique_tokens": tree.unique_tokens,
            "moves": sum(call.meta.moves for call in calls),
        }

    def group(self, query_id: str, results: list[ExecutionResult]) -> GroupSamples:
        """The samples of a complete query; what was chosen is stored with each execution."""
        trees = {r.execution_id: self._tree(r.execution_id) for r in results if r.reward is not None}
        roles = {execution: assign_roles(tree) for execution, tree in trees.items()}
        members = [
            Member(r.execution_id, trees[r.execution_id], roles[r.execution_id], r.reward)
            if r.execution_id in trees
            else Member(r.execution_id, Tree(), {}, self.reward(r))
            for r in results
        ]
        group = build_group(
            query_id,
            members,
            kind=self._config.samples.advantage,
            min_valid=self._config.samples.min_valid,
            j_max=self._config.samples.j_max,
            run_seed=self._config.seed,
            picker=self._picker,
        )
        by_execution: dict[str, list[Sample]] = {execution: [] for execution in trees}
        for sample in group.samples:
            by_execution[sample.execution_id].append(sample)
        for result in results:
            if result.execution_id in trees:
                self.note(result, by_execution[result.execution_id])
                self._show(result, trees[result.execution_id], roles[result.execution_id], by_execution)
        return group

    def _tree(self, execution_id: str) -> Tree:
        return self._trees(execution_id) or self._store.load_tree(execution_id)

    def note(self, result: ExecutionResult, samples: Sequence[Sample] = ()) -> None:
        """Store how an execution ended and what of it is trained."""
        outcome = msgspec.to_builtins(result)
        outcome["samples"] = [
            {"sample": s.sample_id, "role": s.role.value, "tokens": s.tokens, "nodes": list(_trained_nodes(s))}
            for s in samples
        ]
        outcome["advantage"] = samples[0].advantage if samples else None
        self._store.finish_execution(result.execution_id, outcome)

    def _show(
        self, result: ExecutionResult, tree: Tree, roles: dict[int, Role], samples: dict[str, list[Sample]]
    ) -> None:
        """Keep the most telling trees as JSON for the report."""
        own = samples[result.execution_id]
        interest = len(set(roles.values())) + len(roles) / 100 + (_PREFER_TRAINED if own else 0.0)
        weakest = min(self._shown, key=self._shown.__getitem__) if len(self._shown) >= _KEEP_TREES else None
        if weakest is not None and interest <= self._shown[weakest]:
            return
        self._folder.mkdir(exist_ok=True)
        if weakest is not None:
            del self._shown[weakest]
            (self._folder / f"{weakest}.json").unlink(missing_ok=True)
        self._shown[result.execution_id] = interest
        drawing = tree_to_json(
            tree,
            roles,
            trained_masks(own),
            execution=result.execution_id,
            task=result.task_id,
            outcome=result.outcome.value,
            reward=result.reward,
            decode=self._decode,
        )
        (self._folder / f"{result.execution_id}.json").write_bytes(msgspec.json.encode(drawing))


def _trained_nodes(sample: Sample) -> Iterator[int]:
    """The nodes of which a sample trains at least one token."""
    start = 0
    for node, length in sample.segments:
        if sample.mask[start : start + length].any():
            yield node
        start += length
