"""Looking into a run folder, also of a run that is going on: its executions, their trees, and whether they rebuild."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opengyre.record.draw import check_tree, draw_tree
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store
from opengyre.run.preflight import load_run


@dataclass
class Checked:
    """What ``replay`` went through."""

    executions: int = 0
    calls: int = 0
    paths: int = 0
    tokens: int = 0


def list_executions(run_dir: Path) -> str:
    """One line per execution: id, calls, outcome, reward."""
    with _calls(run_dir) as store:
        rows = []
        for execution in store.executions():
            outcome = execution.outcome or {}
            reward = outcome.get("reward")
            shown = "-" if reward is None else f"{reward:.2f}"
            state = outcome.get("outcome", execution.meta.get("split", ""))
            rows.append(f"{execution.execution_id:<16} {execution.calls:>4} calls  {shown:>5}  {state}")
    return "\n".join(rows) or "no executions"


def draw_execution(run_dir: Path, execution_id: str) -> str:
    """The tree of one execution as text. Raises RecordError for an unknown one."""
    with _calls(run_dir) as store:
        tree = store.load_tree(execution_id)
        stored = store.execution(execution_id)
    samples = (stored.outcome or {}).get("samples", [])
    trained = [(node, sample["sample"].rpartition("/")[2]) for sample in samples for node in sample["nodes"]]
    return draw_tree(tree, assign_roles(tree), trained)


def replay(run_dir: Path, execution_id: str | None = None) -> tuple[Checked, list[str]]:
    """Rebuild every path and compare it with what the engine saw and sampled; returns what differs, one line each."""
    checked, differences = Checked(), []
    with _calls(run_dir) as store:
        names = [execution_id] if execution_id else [e.execution_id for e in store.executions()]
        for name in names:
            tree = store.load_tree(name, verify=False)
            checked.executions += 1
            checked.calls += len(tree.calls())
            checked.paths += len(tree.leaves())
            checked.tokens += tree.unique_tokens
            differences += [f"{name}: {line}" for line in check_tree(tree)]
    return checked, differences


def _calls(run_dir: Path) -> Store:
    """The calls of a run, or of a record that opengyre proxy keeps. Raises ConfigError when there are none."""
    file = run_dir / "calls.db"
    if not file.is_file():
        load_run(run_dir)  # says so if it is no run at all
    return Store.open(file, readonly=True)
