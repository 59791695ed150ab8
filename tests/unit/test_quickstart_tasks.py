"""Quickstart tasks: deterministic, disjoint between splits, graded fairly and without trusting the workspace."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from opengyre.errors import ConfigError, TaskError
from opengyre.executions.task import Task
from opengyre.quickstart.behaviours import BEHAVIOURS, Function
from opengyre.quickstart.tasks import QuickstartTasks, functions_of

HANG = "while True: pass\n"


@pytest.fixture(scope="module")
def tasks():
    return QuickstartTasks(40, 12, 0, {"check_median_s": 0.0})


def modules_of(task: Task) -> dict[str, list[Function]]:
    """The functions a task asks for, found again from its evaluator's spec and its documents."""
    text = task.files["SPEC.md"] + task.files.get("UTIL.md", "")
    by_line = {f.requirement: f for s in ("train", "held_out") for f in functions_of(s)}
    asked = {by_line[line].signature: by_line[line] for line in text.splitlines() if line in by_line}
    spec = json.loads(task.evaluator_files["spec.json"])
    return {module: [asked[s] for s in signatures] for module, signatures in spec.items()}


def lay_out(task: Task, folder: Path, solution: dict[str, str]) -> Path:
    workspace = folder / "workspace"
    workspace.mkdir()
    for path, text in {**task.files, **solution}.items():
        (workspace / path).write_text(text)
    for path in task.executables:
        (workspace / path).chmod(0o755)
    return workspace


def evaluate(task: Task, folder: Path, solution: dict[str, str]) -> dict:
    workspace, aside = lay_out(task, folder, solution), folder / "aside"
    aside.mkdir()
    for path, text in task.evaluator_files.items():
        (aside / path).write_text(text)
    reward = aside / "reward.json"
    argv = [a.format(workspace=workspace, task=aside, reward=reward) for a in task.evaluator]
    subprocess.run(argv, check=True, cwd=folder)
    return json.loads(reward.read_text())


def reference(task: Task) -> dict[str, str]:
    return {m: "".join(f.definition() for f in fs) for m, fs in modules_of(task).items()}


def test_equal_arguments_give_equal_tasks_and_another_seed_gives_others(tasks):
    again = QuickstartTasks(40, 12, 0, {"check_median_s": 0.0})
    assert again.tasks("train") == tasks.tasks("train")
    assert QuickstartTasks(40, 12, 1, {}).tasks("train")[0].files != tasks.tasks("train")[0].files
    ids = [t.task_id for s in ("train", "held_out") for t in tasks.tasks(s)]
    assert len(set(ids)) == 52


def test_no_function_of_a_held_out_task_is_asked_for_in_training(tasks):
    asked = {s: {f for t in tasks.tasks(s) for fs in modules_of(t).values() for f in fs} for s in ("train", "held_out")}
    assert asked["train"] and asked["held_out"] and not asked["train"] & asked["held_out"]
    assert not set(functions_of("train")) & set(functions_of("held_out"))


def test_every_split_mixes_small_and_big_tasks(tasks):
    for split in ("train", "held_out"):
        big = [("UTIL.md" in t.files) for t in tasks.tasks(split)]
        assert 0.2 < sum(big) / len(big) < 0.4
        assert any(big[:8])


def test_the_cases_of_every_function_tell_the_mistake_from_the_reference(tasks):
    for behaviour in BEHAVIOURS.values():
        for constant in (2, 9):
            function = Function("tax", behaviour, constant)
            cases = function.cases(__import__("random").Random(constant), 4)
            wrong: dict = {}
            exec(function.definition(right=False), wrong)
            assert len(cases) == 4 and any(wrong["tax"](value) != expected for value, expected in cases)


@pytest.mark.parametrize("index", [0, 3])
def test_the_reference_earns_everything(tasks, tmp_path, index):
    task = tasks.tasks("train")[index]
    answer = evaluate(task, tmp_path, reference(task))
    assert answer["reward"] == 1.0 and set(answer["checks"].values()) == {1.0}


def test_an_empty_workspace_earns_nothing(tasks, tmp_path):
    assert evaluate(tasks.tasks("train")[0], tmp_path, {})["reward"] == 0.0


def test_a_part_earns_its_share(tasks, tmp_path):
    task = tasks.tasks("train")[0]
    functions = modules_of(task)["lib.py"]
    source = functions[0].definition() + "".join(f.definition(right=False) for f in functions[1:])
    answer = evaluate(task, tmp_path, {"lib.py": source})
    assert answer["reward"] == pytest.approx(1 / len(functions))
    assert answer["checks"][f"lib.py:{functions[0].signature}"] == 1.0


@pytest.mark.parametrize(
    "source",
    [
        "def price(:",
        "raise SystemExit",
        "import os\nos._exit(0)",
        "import os, sys\nfor fd in range(3, 20):\n    try: os.write(fd, b'[0, [1, 1, 1, 1, 1, 1, 1, 1]]\\n')\n"
        "    except OSError: pass\nos._exit(0)",
    ],
)
def test_a_broken_or_forging_module_scores_zero_and_is_no_error(tasks, tmp_path, source):
    assert evaluate(tasks.tasks("train")[0], tmp_path, {"lib.py": source})["reward"] == 0.0


def test_what_else_the_agent_wrote_counts_for_nothing(tasks, tmp_path):
    planted = {"reward.json": '{"reward": 1.0}', "spec.json": "{}", "json.py": "raise ValueError", "check": "exit 0"}
    assert evaluate(tasks.tasks("train")[0], tmp_path, planted)["reward"] == 0.0


def test_a_solution_cannot_write_the_reward_nor_equal_everything(tasks, tmp_path):
    function = modules_of(tasks.tasks("train")[0])["lib.py"][0]
    path = tmp_path / "aside" / "reward.json"
    source = (
        f"class Yes(int):\n    __eq__ = lambda a, b: True\n"
        f"try: open({str(path)!r}, 'w').write('{{\"reward\": 1.0}}')\nexcept OSError: pass\n"
        f"def {function.signature}: return Yes(987654)\n"
    )
    assert evaluate(tasks.tasks("train")[0], tmp_path, {"lib.py": source})["reward"] == 0.0


def test_a_function_that_hangs_costs_itself_only(tasks, tmp_path):
    task = tasks.tasks("train")[0]
    first, *others = modules_of(task)["lib.py"]
    source = f"def {first.signature}:\n    {HANG}" + "".join(f.definition() for f in others)
    short = {**task.evaluator_files}
    short["evaluate.py"] = short["evaluate.py"].replace("RLIMIT_CPU, 2", "RLIMIT_CPU, 1")
    task = Task(**{**{n: getattr(task, n) for n in task.__struct_fields__}, "evaluator_files": short})
    answer = evaluate(task, tmp_path, {"lib.py": source})
    assert answer["reward"] == pytest.approx(len(others) / (len(others) + 1))


def test_check_says_which_functions_behave(tasks, tmp_path):
    task = next(t for t in tasks.tasks("train") if "UTIL.md" in t.files)
    modules = modules_of(task)
    sources = {"lib.py": "".join(f.definition() for f in modules["lib.py"]), "util.py": "syntax error"}
    workspace = lay_out(task, tmp_path, sources)
    env = {"PATH": os.defpath, "ANTHROPIC_BASE_URL": "http://h:1/x/e1"}
    said = subprocess.run(["./check"], cwd=workspace, capture_output=True, text=True, env=env, check=True).stdout
    good, bad = modules["lib.py"], modules["util.py"]
    assert said.splitlines() == [f"{f.signature} ok" for f in good] + [f"{f.signature} FAIL" for f in bad]
    one = subprocess.run(["./check", "util.py"], cwd=workspace, capture_output=True, text=True, env=env, check=True)
    assert one.stdout.splitlines() == [f"{f.signature} FAIL" for f in bad]


def test_the_time_of_a_check_depends_on_task_execution_and_run_alone(tmp_path, monkeypatch):
    from opengyre.quickstart import check

    monkeypatch.setattr(check, "MEDIAN_S", 0.6)
    monkeypatch.setattr(check, "SIGMA", 1.2)

    def times(task: str, execution: str, place: str) -> list[float]:
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        monkeypatch.setattr(check, "SEED", task)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", execution)
        return [check.wait_s() for _ in range(2)]

    one = times("t0", "http://127.0.0.1:4000/x/e0", "a")
    assert one == times("t0", "http://127.0.0.1:5000/x/e0", "b")
    assert one[0] != one[1]
    assert one != times("t0", "http://127.0.0.1:4000/x/e1", "c")
    assert one != times("t1", "http://127.0.0.1:4000/x/e0", "d")
    many = sorted(times("t", f"http://h/x/{i}", f"m{i}")[0] for i in range(400))
    assert 0.4 < many[200] < 0.9 and many[-1] > 8.0  # a long tail over a short median


def test_unknown_options_and_splits_are_named():
    with pytest.raises(ConfigError, match="did you mean agent_s"):
        QuickstartTasks(1, 1, 0, {"agents_s": 3})
    with pytest.raises(ConfigError):
        QuickstartTasks(1, 1, 0, {"agent_s": "long"})
    with pytest.raises(TaskError, match="held_out"):
        QuickstartTasks(1, 1, 0, {}).tasks("test")
    assert QuickstartTasks(1, 0, 0, {"agent_s": 3.0}).tasks("train")[0].deadlines.agent_s == 3.0
