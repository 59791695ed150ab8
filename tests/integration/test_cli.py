"""The command line: bad input is one clear line and an exit code, and leaves nothing behind."""

import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_run
from opengyre.cli import main
from opengyre.config import to_toml
from opengyre.run.inspect import replay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def file(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(tiny_run.config(tmp_path, model)))
    return path


def fails(capsys: pytest.CaptureFixture[str], argv: list[str], *says: str) -> None:
    code = main(argv)
    err = capsys.readouterr().err
    assert code in (1, 2) and err.count("\n") == 1 and "Traceback" not in err, err
    for words in says:
        assert words in err


def test_dry_run_prints_the_resolved_config_and_writes_nothing(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), "--dry-run", "--set", "steps=9"]) == 0
    out = capsys.readouterr().out
    assert "steps = 9" in out and "6 to train on, 2 held out" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cells.slotz=3", "did you mean cells.slots?"),
        ("model.path=/nowhere", "model.path: /nowhere is no folder"),
        ("cells.satellites=0", "at least 1"),
        ("tasks.path=/nowhere", "/nowhere"),
        ("schedule.policy=greedy", "one of elastic, elastic-plus, colocate, async, lend"),
        ("harness.kind=emacs", "quickstart, command, claude_code"),
        ("run_dir={nam}", "only {name} and {time}"),
        ("run_dir=/proc/opengyre", "/proc/opengyre"),
    ],
)
def test_bad_values_are_one_line(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, says: str
) -> None:
    fails(capsys, ["train", str(file), "--set", override], says)
    assert not (tmp_path / "run").exists()


def test_a_task_without_evaluator_is_named(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks" / "train" / "train-3" / "task.toml").write_text("")
    fails(capsys, ["train", str(file)], "train-3", "evaluator")
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_named(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fails(capsys, ["train", str(file), "--set", f"proxy.port={port}"], str(port), "in use")
    assert not (tmp_path / "run").exists()


def test_a_run_folder_is_never_overwritten(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    fails(capsys, ["train", str(file), "--set", f"run_dir={other}"], "is not empty")
    fails(capsys, ["train", str(file), "--set", f"run_dir={other}", "--resume"], "holds no run to resume")
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]


def test_inspecting_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("tree", "replay", "report"):
        fails(capsys, [command, str(tmp_path)], "holds no run")


def test_a_checkpoint_of_another_model_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), "--set", "steps=1"]) == 0
    other = tiny_run.make_model(tmp_path / "other", hidden_size=48)
    capsys.readouterr()
    before = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    resume = ["train", str(tmp_path / "run"), "--resume", "--set", "steps=2", "--set", f"model.path={other}"]
    fails(capsys, resume, "version-000001", "hidden_size is 32", "this model has 48")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == before


def test_a_full_disk_ends_the_run_with_one_line_and_what_was_committed_stays(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "opengyre", "train", str(file), "--set", "steps=40"]

    def no_file_beyond_some_steps() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    done = subprocess.run(
        command, preexec_fn=no_file_beyond_some_steps, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("opengyre: ") and done.stderr.count("\n") == 1
    assert "too large" in done.stderr or "full" in done.stderr or "I/O" in done.stderr
    checked, differences = replay(tmp_path / "run")
    assert checked.calls > 0 and differences == []
    assert main(["train", str(tmp_path / "run"), "--resume", "--set", "steps=3"]) == 0
