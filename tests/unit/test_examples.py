"""The examples stay true: configs are read, chores have one right way, and the demonstrator does them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from opengyre.config import load

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = [path for path in sorted(EXAMPLES.rglob("*.toml")) if path.name != "task.toml"]
KINDS = ("largest", "count", "distinct", "sum", "errors")


@pytest.fixture(scope="module")
def chores() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES / "claude_code"))
    import chores

    yield chores
    sys.path.remove(str(EXAMPLES / "claude_code"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_valid(path: Path) -> None:
    config = load(path, [])
    for named in (config.tasks.kind, config.paced.program):
        if named and ".py:" in named:
            assert (ROOT / named.split(":")[0]).is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_a_chore_has_one_right_way(tmp_path: Path, chores: ModuleType, kind: str) -> None:
    for seed in range(5):
        chore = chores.Chore("a", kind, "jobs")
        files, wanted = chores.workspace([chore], Random(seed))
        for right in (True, False):
            folder = tmp_path / f"{seed}-{right}"
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_text(content)
            (folder / "check").write_text(chores.check_script([chore], wanted))
            subprocess.run(["bash", "-c", chore.command(right=right)], cwd=folder, check=True)
            assert ((folder / "a").read_text().strip() == wanted["a"].strip()) == right
            said = subprocess.run(["sh", "check"], cwd=folder, capture_output=True, text=True).stdout
            assert said.startswith("a: OK" if right else "a: FAILED")


def test_held_out_tasks_are_not_trained_on(tmp_path: Path, chores: ModuleType) -> None:
    for new_pairs in (True, False):
        folder = tmp_path / str(new_pairs)
        chores.write_tasks(folder, train=64, held_out=24, conf_share=0.0, new_pairs=new_pairs)
        texts = {
            split: {(task / "workspace" / "TODO.md").read_text() for task in (folder / split).iterdir()}
            for split in ("train", "held_out")
        }
        assert [len(texts["train"]), len(texts["held_out"])] == [64, 24] and not texts["train"] & texts["held_out"]
    assert not set(chores.pairs("train")) & set(chores.pairs("held_out"))
