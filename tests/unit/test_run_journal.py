"""The journal: what was acknowledged is there after a kill, and a step without its checkpoint never happened."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opengyre.errors import RecordError
from opengyre.executions.outcome import ExecutionResult, Outcome
from opengyre.run.journal import Journal


def result(execution: str, query: str, reward: float = 1.0) -> ExecutionResult:
    return ExecutionResult(execution, query, "t", Outcome.FINISHED, reward, checks={"a": reward})


def test_queries_results_and_steps_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.db")
    for n in range(3):
        journal.admit(f"q{n}", f"task-{n}", "train", version=n // 2)
    journal.admit("h0", "task-h", "held_out", version=0)
    journal.finish(result("q0-00-0", "q0"))
    journal.finish(result("q0-01-0", "q0", 0.5))
    journal.complete("q0")
    journal.close()
    again = Journal(tmp_path / "run.db")
    assert [(q.query_id, q.version, q.complete) for q in again.queries("train")] == [
        ("q0", 0, True), ("q1", 0, False), ("q2", 1, False),
    ]  # fmt: skip
    assert [r.reward for r in again.results("q0")] == [1.0, 0.5]
    assert again.results("q1") == []


def test_a_step_without_its_checkpoint_is_rolled_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.db")
    for n in range(4):
        journal.admit(f"q{n}", "t", "train", 0)
    journal.prepare_step(1, 1, ["q0", "q1"], {"step": 1})
    journal.prepare_step(2, 2, ["q2", "q3"], {"step": 2})
    journal.rollback(1)
    assert [q.trained_step for q in journal.queries("train")] == [1, 1, None, None]
    assert journal.steps() == [{"step": 1}]


def test_o07_everything_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from opengyre.run.journal import Journal\n"
        "j = Journal(Path(sys.argv[1]))\n"
        "n = 0\n"
        "while True:\n"
        "    j.admit(f'q{n}', 't', 'train', 0)\n"
        "    sys.stdout.write(f'{n}\\n'); sys.stdout.flush(); n += 1\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path / "run.db"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(50):
        last = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read().split()
    child.wait()
    acknowledged = int(rest[-1]) if rest else last
    numbers = [int(q.query_id[1:]) for q in Journal(tmp_path / "run.db").queries("train")]
    assert numbers[: acknowledged + 1] == list(range(acknowledged + 1)) and len(numbers) <= acknowledged + 2


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="unable to open"):
        Journal(tmp_path / "absent" / "run.db")
