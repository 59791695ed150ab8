"""Harness adapters and task folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opengyre.config import HarnessConfig, TasksConfig
from opengyre.errors import ConfigError, TaskError
from opengyre.executions.harness.quickstart import HARNESS_FILE
from opengyre.executions.harness.registry import make_harness
from opengyre.executions.task import Task
from opengyre.executions.tasks_folder import FolderTasks
from opengyre.executions.tasks_registry import make_tasks

ASKED = {
    "base_url": "http://127.0.0.1:9/x/q000000-00-0",
    "key": "k",
    "instruction": "say {model} and {other}",
    "workspace": Path("/workspace"),
    "home": Path("/home/agent"),
    "model": "m",
}


def test_a_command_is_filled_in_once():
    config = HarnessConfig(
        kind="command",
        command=[
            "tool",
            "-p",
            "{instruction}",
            "--in={workspace}",
            "{home}",
            "{base_url}",
            "{key}",
            "{model}",
            "{x}",
        ],
        env={"TOOL_HOME": "{home}/tool"},
    )
    launch = make_harness(config).launch(**ASKED)
    assert launch.argv == [
        *("tool", "-p", "say {model} and {other}", "--in=/workspace", "/home/agent"),
        *("http://127.0.0.1:9/x/q000000-00-0", "k", "m", "{x}"),
    ]
    assert launch.stdin == ""
    assert launch.env == {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9/x/q000000-00-0",
        "ANTHROPIC_AUTH_TOKEN": "k",
        "ANTHROPIC_MODEL": "m",
        "OPENAI_BASE_URL": "http://127.0.0.1:9/x/q000000-00-0/v1",
        "OPENAI_API_KEY": "k",
        "OPENAI_MODEL": "m",
        "TOOL_HOME": "/home/agent/tool",
    }


def test_a_command_without_the_instruction_reads_it_from_stdin():
    launch = make_harness(HarnessConfig(kind="command", command=["tool"])).launch(**ASKED)
    assert launch.stdin == "say {model} and {other}"


def test_the_quickstart_harness_is_the_shipped_file():
    launch = make_harness(HarnessConfig()).launch(**ASKED)
    assert launch.argv == [sys.executable, "-I", "-S", str(HARNESS_FILE)] and launch.stdin == ASKED["instruction"]
    assert HARNESS_FILE.is_file() and launch.tools == [str(HARNESS_FILE)]


def test_unknown_kinds_and_options_are_named():
    with pytest.raises(ConfigError, match=r"harness\.kind"):
        make_harness(HarnessConfig(kind="other"))
    with pytest.raises(ConfigError, match="toolz"):
        make_harness(HarnessConfig(kind="command", command=["x"], options={"toolz": []}))
    with pytest.raises(ConfigError, match=r"tasks\.kind"):
        make_tasks(TasksConfig(kind="other"))
    with pytest.raises(ConfigError, match=r"tasks\.path"):
        make_tasks(TasksConfig(kind="folder"))
    with pytest.raises(ConfigError, match="no_such_module"):
        make_tasks(TasksConfig(kind="no_such_module:tasks"))


def write(folder: Path, text: str = 'instruction = "do"\nevaluator = ["true"]\n', **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(text)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_md", ".md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_a_whole_task(tmp_path):
    text = """
evaluator = ["sh", "{task}/check.sh", "{workspace}", "{reward}"]
reward_range = [-1.0, 2.0]
deadlines = { agent_s = 5.0 }
env = { A = "b" }
"""
    folder = write(tmp_path / "t1", text, instruction_md="do", workspace__src__run="#!/bin/sh", evaluator__check="ok")
    (folder / "workspace/src/run").chmod(0o755)
    (task,) = FolderTasks(tmp_path).tasks("train")
    assert isinstance(task, Task) and (task.task_id, task.instruction) == ("t1", "do")
    assert (task.files, task.executables) == ({"src/run": "#!/bin/sh"}, ["src/run"])
    assert task.evaluator_files == {"check": "ok"} and task.reward_range == (-1.0, 2.0)
    assert task.deadlines.agent_s == 5.0 and task.env == {"A": "b"}


def test_splits_by_folder_and_by_key(tmp_path):
    for name in ("train/a", "train/b", "train/c", "held_out/d"):
        write(tmp_path / "folders" / name)
    tasks = FolderTasks(tmp_path / "folders", seed=3)
    assert sorted(t.task_id for t in tasks.tasks("train")) == ["a", "b", "c"]
    assert [t.task_id for t in tasks.tasks("held_out")] == ["d"]
    again = FolderTasks(tmp_path / "folders", seed=3)
    assert again.tasks("train") == tasks.tasks("train")
    write(tmp_path / "keys" / "a")
    write(tmp_path / "keys" / "b", 'instruction = "do"\nevaluator = ["true"]\nsplit = "held_out"\n')
    keys = make_tasks(TasksConfig(kind="folder", path=str(tmp_path / "keys")))
    assert [[t.task_id for t in keys.tasks(s)] for s in ("train", "held_out")] == [["a"], ["b"]]
    with pytest.raises(TaskError, match="unknown split"):
        keys.tasks("test")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('instruction = "do"', "evaluator"),
        ('evaluator = ["true"]', "instruction"),
        ('instruction = "do"\nevaluatr = ["true"]', "did you mean evaluator"),
        ('instruction = "do"\nevaluator = "true"', "evaluator"),
        ('instruction = "do"\nevaluator = ["true"]\nsplit = "test"', "split"),
        ('instruction = "do"\nevaluator = ["true"]\nreward_range = [1.0, 0.0]', "reward_range"),
        ('instruction = "do"\nevaluator = ["true"]\ndeadlines = { agent = 1 }', "agent"),
        ("instruction = ", "task.toml"),
    ],
)
def test_an_incomplete_task_names_itself_and_the_key(text, named, tmp_path):
    write(tmp_path / "broken", text)
    with pytest.raises(TaskError, match=named) as error:
        FolderTasks(tmp_path)
    assert "task broken" in str(error.value)


def test_broken_folders(tmp_path):
    with pytest.raises(TaskError, match="no such folder"):
        FolderTasks(tmp_path / "none")
    folder = write(tmp_path / "t")
    (folder / "workspace").mkdir()
    (folder / "workspace" / "bin").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match=r"workspace/bin is not UTF-8"):
        FolderTasks(tmp_path)


def test_executions_import_without_torch():
    modules = "runner, groups, evaluate, tasks_registry, harness.registry, sandbox.registry"
    script = "import sys\n" + "".join(f"import opengyre.executions.{m.strip()}\n" for m in modules.split(","))
    done = subprocess.run([sys.executable, "-c", script + "assert 'torch' not in sys.modules"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
