"""The example's tasks and demonstrator: the right way works, the careless one never does, and all of it is known."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "claude_code"))

import chores
import demonstrator

from opengyre.config import load
from opengyre.executions.tasks_folder import FolderTasks
from opengyre.executions.tasks_registry import make_tasks
from opengyre.proxy.conversation import Conversation, Message, Text, Tool, ToolCall
from opengyre.proxy.render import Renderer

EXAMPLE = Path(chores.__file__).parent


def shell(folder: Path, command: str) -> str:
    return subprocess.run(["/bin/sh", "-c", command], cwd=folder, capture_output=True, text=True).stdout


def do(folder: Path, chore: chores.Chore, *, right: bool) -> None:
    conf = folder / "conf"
    if chore.kind == "set" and right:
        lines = [f"{chore.subject}={chore.value}" if line.startswith(f"{chore.subject}=") else line
                 for line in conf.read_text().splitlines()]  # fmt: skip
        conf.write_text("".join(f"{line}\n" for line in lines))
    else:
        shell(folder, chore.command(right=right))


@pytest.mark.parametrize("seed", range(12))
def test_the_right_way_is_scored_1_and_the_careless_way_0(tmp_path: Path, seed: int) -> None:
    for right in (True, False):
        rng, task = Random(seed), tmp_path / f"task-{right}"
        todo = chores.draw(rng, "train")
        chores.write_task(task, todo, rng)
        workspace = task / "workspace"
        assert demonstrator.chores_of((workspace / "TODO.md").read_text()) == [
            c if c.kind == "set" else chores.Chore(c.label, c.kind, c.subject) for c in todo
        ]
        for chore in todo:
            do(workspace, chore, right=right)
        verdict = "OK" if right else "FAILED"
        assert shell(workspace, "./check") == "".join(f"{chores.place(c)}: {verdict}\n" for c in todo)
        subprocess.run(
            [sys.executable, task / "evaluator" / "evaluate.py", workspace, tmp_path / "reward.json"], check=True
        )
        assert f'"reward": {float(right)}' in (tmp_path / "reward.json").read_text()


def test_tasks_are_folders_that_load_and_no_held_out_pair_is_trained(tmp_path: Path) -> None:
    chores.write_tasks(tmp_path, train=20, held_out=10)
    tasks = FolderTasks(tmp_path)
    assert len(tasks.tasks("train")) == 20
    assert len(tasks.tasks("held_out")) == 10
    assert not set(chores.pairs("train")) & set(chores.pairs("held_out"))
    pairs = {
        (c.kind, c.subject)
        for task in tasks.tasks("held_out")
        for c in demonstrator.chores_of(task.files["TODO.md"])
        if c.kind != "set"
    }
    assert pairs <= set(chores.pairs("held_out"))


READ = "1\ta: largest in ages\n2\tb: set depth to 40 in conf\n3\tc: errors in logs\n4\t"
OPENING = ["system\n…", "\nuser\nDo the chores of TODO.md."]
HAS_READ = [*OPENING, "\nassistant\n" + demonstrator.call("Read", file_path="TODO.md"), f"\ntool\n{READ}"]
CONF = "1\tdepth=12\n2\twidth=77\n3\t"


def play(turns: list[str], **habits: float) -> str:
    return demonstrator.Demonstrator(demonstrator.Habits(**habits))([*turns, "\nassistant\n"], Random(0)).text


def test_the_demonstrator_reads_works_edits_checks_and_ends() -> None:
    always = {"right": 1 - 1e-9, "checks": 1 - 1e-9}
    assert play(OPENING) == demonstrator.call("Read", file_path="TODO.md")
    work = play(HAS_READ, **always)
    bash = demonstrator.call("Bash", command="sort -n ages | tail -1 > a\ngrep -ic error logs > c")
    assert work == bash + "\n" + demonstrator.call("Read", file_path="conf")
    turns = [*HAS_READ, "\nassistant\n" + work, "\ntool\n(Bash completed with no output)", f"\ntool\n{CONF}"]
    edit = play(turns, **always)
    assert edit == demonstrator.call("Edit", file_path="conf", old_string="depth=12", new_string="depth=40")
    turns += ["\nassistant\n" + edit, "\ntool\nThe file conf has been updated successfully."]
    check = play(turns, **always)
    assert check == demonstrator.call("Bash", command="./check")
    fine = [*turns, "\nassistant\n" + check, "\ntool\na: OK\nconf: OK\nc: OK"]
    assert play(fine, **always) == "Done."
    failed = [*turns, "\nassistant\n" + check, "\ntool\nExit code 1\na: FAILED\nconf: FAILED\nc: OK"]
    assert play(failed, mends=1 - 1e-9, right_when_mending=1e-9) == demonstrator.call(
        "Bash", command="sort ages | tail -1 > a"
    )


def test_the_recorded_probability_is_that_of_the_decisions() -> None:
    said = demonstrator.Demonstrator(demonstrator.Habits(right=0.25))([*HAS_READ, "\nassistant\n"], Random(3))
    careless = sum(word in said.text for word in ("sort ages", "echo depth", "grep -c"))
    assert math.exp(said.logprob) == pytest.approx(0.25 ** (3 - careless) * 0.75**careless)


def test_the_shipped_policy_reads_its_constant_prompt_in_few_tokens_and_names_in_one() -> None:
    renderer = Renderer.load(EXAMPLE / "policy", context=load(EXAMPLE / "bare.toml", []).model.context)
    schema = {"type": "object", "properties": {"command": {"description": "The command to execute", "type": "string"}}}
    text = Text(
        "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n# currentDate"
    )
    asked = Conversation((Message("user", (text,)),), (Tool("Bash", "execute shell commands", schema),))
    rendered = renderer.render(asked)
    assert len(rendered.ids) < len(renderer.decode(rendered.ids)) / 5
    assert all(len(renderer.encode(word)) == 1 for word in (*chores.FILES, *chores.KEYS, *chores.LABELS))
    said = demonstrator.call("Bash", command="sort -n ages | tail -1 > a\ngrep -ic error logs > c")
    turn = renderer.parse([*renderer.encode(said), *renderer.stop_token_ids], "stop", tools=asked.tools)
    (call,) = (part for part in turn.parts if isinstance(part, ToolCall))
    assert call.arguments == {"command": "sort -n ages | tail -1 > a\ngrep -ic error logs > c"}


def test_the_configs_are_of_runs_that_could_start(tmp_path: Path) -> None:
    config = load(
        EXAMPLE / "bare.toml", [f"tasks.path='{tmp_path / 'tasks'}'", f"tasks.kind='{EXAMPLE}/chores.py:task_set'"]
    )
    tasks = make_tasks(config.tasks)
    assert [len(tasks.tasks(split)) for split in ("train", "held_out")] == [64, 24]
    assert "set " not in "".join(task.files["TODO.md"] for task in tasks.tasks("train"))
    assert {task.files["TODO.md"] for task in tasks.tasks("train")}.isdisjoint(
        {task.files["TODO.md"] for task in tasks.tasks("held_out")}
    )
    load(EXAMPLE / "full.toml", [])
