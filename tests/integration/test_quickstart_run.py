"""The shipped quickstart, short: the real policy, harness, tasks and config through the real command line."""

from pathlib import Path

import pytest

from opengyre.cli import main
from opengyre.run.inspect import replay
from test_run_live import events_of


def test_the_shipped_run_works_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    shorter = ["steps=2", "tasks.held_out=3", "eval.executions=1", "tasks.options.check_median_s=0.1", "watch.live=off"]
    command = ["train", "quickstart", "--set", f"run_dir={run_dir}"]
    for setting in shorter:
        command += ["--set", setting]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "held-out pass rate:" in out and "\x1b" not in out
    done = [e for e in events_of(run_dir, "execution") if e["state"] == "done"]
    assert len(done) == 2 * 3 + 2 * 4 * 8 and all(e["reward"] is not None for e in done)
    assert any("sub_agent" in e["leaves"] for e in done), "no task was delegated"
    assert {e["reward"] for e in done} >= {0.5, 1.0}, "no partial credit"
    checked, differences = replay(run_dir)
    assert differences == [] and checked.calls > 200
    main(["tree", str(run_dir), "q000000-00-0"])
    assert "prompt" in capsys.readouterr().out
