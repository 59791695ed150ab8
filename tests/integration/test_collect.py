"""``opengyre collect``: real proxy, real harness processes, a program or the config's own model for a policy."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_run
from opengyre.cli import main
from opengyre.config import RunConfig, to_toml
from opengyre.record.store import Store
from opengyre.samples.recorded import Keep, read_recorded

PROGRAM = """
from opengyre.rollout.program import ProgramEngine, Said

def speak(turns, random):
    assert "say something about" in turns[0] and turns[-1].strip() == "assistant"
    return Said(random.choice(("aye", "nay")), -0.6931)

def engine(config, renderer):
    return ProgramEngine(renderer, speak, seed=config.seed)

def broken(config, renderer):
    return ProgramEngine(renderer, lambda turns, random: 1 / 0)
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    speaker_of(tmp_path).write_text(PROGRAM)
    return tiny_run.config(tmp_path, tiny_run.make_model(tmp_path / "model"))


def speaker_of(folder: Path) -> Path:
    """The engine's file; one process imports one module of a name."""
    return folder / f"speaker_{folder.name}.py"


@pytest.fixture
def words(config: RunConfig, tmp_path: Path) -> list[str]:
    (tmp_path / "run.toml").write_text(to_toml(config))
    return ["collect", str(tmp_path / "run.toml"), "--engine", f"{speaker_of(tmp_path)}:engine"]


def said(run_dir: Path) -> dict[str, tuple[float | None, list[int]]]:
    """Reward and sampled tokens by execution."""
    with Store.open(run_dir / "calls.db", readonly=True) as store:
        found = {}
        for execution in store.executions():
            tree = store.load_tree(execution.execution_id)
            path = tree.rebuild(tree.leaves()[0])
            reward = (execution.outcome or {}).get("reward")
            found[execution.execution_id] = (reward, path.ids[path.sampled].tolist())
        return found


def test_a_program_plays_the_policy_and_its_work_is_scored_and_trained_on(
    words: list[str], config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--executions", "2"]) == 0
    run_dir = Path(config.run_dir)
    assert "12 scored executions" in capsys.readouterr().out
    recorded = said(run_dir)
    assert len(recorded) == 12
    assert all(reward is not None and tokens for reward, tokens in recorded.values())
    assert main(["replay", str(run_dir)]) == 0
    assert (run_dir / "report.html").is_file()

    best = max(reward for reward, _ in recorded.values() if reward is not None)
    kept = read_recorded([run_dir], Keep(min_reward=best))
    assert len(kept) == sum(reward == best for reward, _ in recorded.values())
    out = tmp_path / "tuned"
    told = ["--model", config.model.path, "--out", str(out), "--min-reward", str(best), "--epochs", "2", "--lr", "1e-3"]
    assert main(["sft", str(run_dir), *told, "--threads", "1"]) == 0
    assert (out / "model.safetensors").is_file()

    # Chance hangs on the seed and the execution alone.
    assert main([*words, "--executions", "2", "--set", f"run_dir='{tmp_path / 'again'}'"]) == 0
    assert said(tmp_path / "again") == recorded


def test_a_collection_goes_on_where_it_was_ended(words: list[str], config: RunConfig) -> None:
    run_dir = Path(config.run_dir)
    assert main([*words, "--limit", "2"]) == 0
    first = said(run_dir)
    assert len(first) == 2
    assert main(["collect", str(run_dir), "--resume", *words[2:], "--executions", "2"]) == 0
    both = said(run_dir)
    assert len(both) == 12
    assert first.items() <= both.items()


def test_without_an_engine_the_own_model_on_the_own_cells_answers(
    words: list[str], config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words[:2], "--limit", "2", "--split", "held_out", "--executions", "2"]) == 0
    assert "4 scored executions" in capsys.readouterr().out
    with Store.open(Path(config.run_dir) / "calls.db", readonly=True) as store:
        tree = store.load_tree(store.executions()[0].execution_id)
    cells = {span.cell for *_, span in tree.path(tree.leaves()[0]) if span.sampled}
    assert cells <= {"satellite-1", "satellite-2"}
