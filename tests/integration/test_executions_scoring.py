"""Scoring: only a valid reward from the evaluator's own file is a number."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from executions_world import KINDS, FakeDoor, config, run_once, served, task
from opengyre.errors import EvaluatorError
from opengyre.executions.evaluate import COPY, evaluate, read_reward
from opengyre.executions.outcome import Outcome
from opengyre.executions.sandbox.base import Exit
from opengyre.executions.sandbox.registry import make_sandbox
from opengyre.executions.tasks_folder import read_task


async def score(
    tmp_path: Path, workspace: Path, evaluator: str, *, kind="local", retries=0, deadline_s=60.0, **changes
):
    """Evaluate with a Python script whose argv is WORKSPACE REWARD."""
    argv = [sys.executable, "-ISBc", evaluator, "{workspace}", "{reward}"]
    return await evaluate(
        task(evaluator=argv, **changes),
        workspace,
        make=lambda name: make_sandbox(kind, name, tmp_path / "root"),
        execution_id="a",
        log=tmp_path / "score.log",
        deadline_s=deadline_s,
        retries=retries,
    )


def give(reward: object, then: str = "") -> str:
    """An evaluator that writes ``reward`` (text as it is, anything else as JSON)."""
    text = reward if isinstance(reward, str) else json.dumps(reward)
    return f"import sys, time\nopen(sys.argv[2], 'w').write({text!r})\n{then}"


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "README").write_text("about 42\n")
    return folder


@pytest.mark.parametrize("kind", KINDS)
async def test_a_valid_reward(kind, tmp_path, workspace):
    found = await score(tmp_path, workspace, give({"reward": 0.25, "checks": {"a": 1.0}, "note": "x"}), kind=kind)
    assert (found.reward, found.checks, found.tampered) == (0.25, {"a": 1.0}, False)
    assert list((tmp_path / "root").iterdir()) == []  # its sandbox is gone


@pytest.mark.parametrize(
    "evaluator",
    [
        "pass",  # no reward
        "print(1.0)",  # output is no reward
        "raise SystemExit(0)",
        give({"reward": -1.0}),  # a sentinel (S04)
        give({"reward": 1.5}),
        give('{"reward": NaN}'),
        give('{"reward": 1e999}'),
        give('{"reward": true}'),
        give('{"reward": "1"}'),
        give('{"reward": 1.0'),  # cut
        give("1.0"),
        give({"checks": {}}),
        "import os, sys; os.symlink('/dev/zero', sys.argv[2])",
        "import os, sys; os.mkfifo(sys.argv[2])",
        "import os, sys; os.mkdir(sys.argv[2])",
    ],
)
async def test_no_valid_reward_is_an_error_never_a_number(evaluator, tmp_path, workspace):
    with pytest.raises(EvaluatorError):
        await score(tmp_path, workspace, evaluator)


async def test_S01_an_evaluator_that_overruns_is_killed_and_gives_nothing(tmp_path, workspace):
    spin = "import subprocess, sys; subprocess.Popen(['sleep', '1000'], start_new_session=True)\nwhile True: pass"
    with pytest.raises(EvaluatorError, match=r"overran its 0\.3 s"):
        await score(tmp_path, workspace, spin, deadline_s=0.3)


async def test_S01_a_failed_try_is_repeated(tmp_path, workspace):
    counter = tmp_path / "tries"
    flaky = f"""
import sys
with open({str(counter)!r}, "a") as file:
    file.write(".")
    if file.tell() == 1:
        raise OSError("set-up failed")
open(sys.argv[2], "w").write('{{"reward": 1.0}}')
"""
    with pytest.raises(EvaluatorError, match="set-up failed"):
        await score(tmp_path, workspace, flaky)
    counter.unlink()
    assert (await score(tmp_path, workspace, flaky, retries=1)).reward == 1.0
    assert counter.read_text() == ".."


async def test_S03_a_reward_written_before_the_cut_counts(tmp_path, workspace):
    assert (await score(tmp_path, workspace, give({"reward": 1.0}, "raise SystemExit(3)"))).reward == 1.0
    (tmp_path / "reward.json").write_text('{"reward": 1.0}')
    cut = Exit(code=-9, timed_out=True, tail="")
    assert read_reward(tmp_path / "reward.json", task(), cut, deadline_s=1.0).reward == 1.0


async def test_the_workspace_is_scored_as_a_copy(tmp_path, workspace):
    (workspace / "link").symlink_to("README")
    spoil = "import os, sys; os.chdir(sys.argv[1]); assert os.readlink('link') == 'README'; os.remove('README')\n"
    assert (await score(tmp_path, workspace, spoil + give({"reward": 1.0}))).reward == 1.0
    assert (workspace / "README").exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_workspace_that_cannot_be_copied_is_read_where_it_is(kind, tmp_path, workspace, monkeypatch):
    monkeypatch.setattr("opengyre.executions.evaluate.COPY", COPY.replace("timeout 60 cp", "false"))
    (workspace / "folder").mkdir()
    (workspace / "folder" / ".hidden").write_text("x")
    (workspace / ".hidden").write_text("x")
    look = "import os, sys; w = sys.argv[1]; assert all(map(os.path.isfile, (w + '/.hidden', w + '/folder/.hidden')))\n"
    assert (await score(tmp_path, workspace, look + give({"reward": 1.0}), kind=kind)).reward == 1.0


@pytest.mark.parametrize("kind", KINDS)
async def test_no_trick_in_the_workspace_avoids_the_score(kind, tmp_path, workspace):
    """S06: a workspace that cannot be copied, or is gone, is scored all the same."""
    os.mkfifo(workspace / "fifo")
    with (workspace / "giant").open("wb") as file:
        file.truncate(1 << 42)
    zero = give({"reward": 0.0})
    assert (await score(tmp_path, workspace, zero, kind=kind)).reward == 0.0
    shutil.rmtree(workspace)
    assert (await score(tmp_path, workspace, zero, kind=kind)).reward == 0.0
    workspace.symlink_to("/nowhere")
    assert (await score(tmp_path, workspace, zero, kind=kind)).reward == 0.0
    workspace.unlink()
    workspace.write_text("not a folder")
    assert (await score(tmp_path, workspace, zero, kind=kind)).reward == 0.0


async def test_S04_history_moved_by_the_agent_changes_nothing(tmp_path):
    """The agent commits on a branch and adds an untracked file; the evaluator sees files, and its own tests."""
    script = """
call()
run = lambda *argv: subprocess.run(argv, check=True, capture_output=True)
run("git", "init", "-q", "-b", "agent", ".")
open("test_answer.py", "w").write("assert True")
run("git", "add", "."); run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "mine")
open("x.py", "w").write("new")
"""
    evaluator = """
import os, sys
os.chdir(sys.argv[1])
assert open("x.py").read() == "new" and open(sys.argv[3] + "/test_answer.py").read() == "assert False"
open(sys.argv[2], "w").write('{"reward": 0.0}')
"""
    the_task = task(
        files={"test_answer.py": "assert False"},
        evaluator_files={"test_answer.py": "assert False"},
        evaluator=[sys.executable, "-ISBc", evaluator, "{workspace}", "{reward}", "{task}"],
    )
    async with served(FakeDoor()) as door:
        result = await run_once(tmp_path, door, script, the_task)
    assert (result.outcome, result.reward, result.tampered) == (Outcome.FINISHED, 0.0, True), result.detail


@pytest.mark.parametrize("kind", KINDS)
async def test_S05_prewritten_rewards_and_edited_tests_do_not_count(kind, tmp_path):
    script = """
call()
good = json.dumps({"reward": 1.0})
for folder in (".", os.environ["HOME"], os.environ["TMPDIR"], os.environ["HOME"] + "/reward", "logs"):
    os.makedirs(folder, exist_ok=True)
    for name in ("reward.json", "reward.txt"):
        open(folder + "/" + name, "w").write(good)
open("check.py", "w").write("import sys; open(sys.argv[2], 'w').write('%s')" % good)  # what the evaluator is called
for name in ("python3", "json.py", "pathlib.py", "sitecustomize.py"):
    open(name, "w").write("raise SystemExit(0)")
os.makedirs(os.environ["HOME"] + "/.local/bin")
os.symlink("/bin/true", os.environ["HOME"] + "/.local/bin/python3")
"""
    async with served(FakeDoor()) as door:
        the_task = task(evaluator=["python3", "{task}/check.py", "{workspace}", "{reward}"])
        result = await run_once(tmp_path, door, script, the_task, kind)
    assert (result.outcome, result.reward, result.tampered) == (Outcome.FINISHED, 0.0, True), result.detail


async def test_the_example_task_scores_its_solution(tmp_path):
    _, the_task = read_task(Path(__file__).parents[2] / "examples/tasks/hello")
    script = """
call()
open("hello", "w").write('#!/bin/sh\\\\nname=$(echo $1)\\\\necho "Hello, ${name:-world}!"\\\\n')
os.chmod("hello", 0o755)
""".replace("\\\\n", "\\n")
    async with served(FakeDoor()) as door:
        good = await run_once(tmp_path / "a", door, script, the_task, config=config("auto"))
        idle = await run_once(tmp_path / "b", door, "call()", the_task, config=config("auto"))
    assert (good.reward, idle.reward) == (1.0, 0.0), (good.detail, idle.detail)
