"""Config: every bad input is one clear error; what is resolved can be written and read back."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from opengyre.config import RunConfig, build, load, to_toml
from opengyre.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.learning_rat=1", "train.learning_rat: unknown key (did you mean train.learning_rate?)"),
        ("zzz=1", "zzz: unknown key (one of "),
        ("steps=many", "steps: 'many' (expected `int`, got `str`)"),
        ("steps=-1", "steps: -1 (at least 0)"),
        ("cells=3", "cells: 3 (a table)"),
        ("train.loss='dpo'", "train.loss: 'dpo' (invalid enum value 'dpo')"),
        ("sampling.top_p=0.9", "sampling: top_p=0.9"),
        ("cells.satellites=0", "cells.satellites: policy 'elastic' with no satellite"),
        ("schedule.train_cells=2", "schedule.train_cells: 2 of 2 satellites always train"),
        ("harness.kind='command'", "harness.command: is empty"),
        ("nonsense", "--set: 'nonsense' (key.path=value)"),
        ("steps.a.b=1", "steps: {'a': {'b': 1}}"),
    ],
)
def test_a_bad_value_names_key_value_and_what_is_right(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, [override])
    assert says.split(" (")[0] in str(error.value)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('steps = 5\n[cells]\nslots = 4\n[harness]\nenv = {A = "b"}\n')
    config = load(file, ["steps=3", "run_dir=/tmp/x y", "cells.satellites=7"])
    assert (config.steps, config.run_dir, config.cells.slots, config.cells.satellites) == (3, "/tmp/x y", 4, 7)
    assert config.harness.env == {"A": "b"}


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_missing_file_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file|is a folder"):
        load(tmp_path / name, [])


def test_broken_toml_names_file_and_place(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"c\.toml.*line 1"):
        load(file, [])


def test_the_resolved_config_reads_back_equal() -> None:
    config = load(None, ['harness.env={\'X-Y\' = "q\\"z"}', "tasks.options={a=[1,2]}", "train.learning_rate=3e-4"])
    assert build(tomllib.loads(to_toml(config))) == config
    assert build(tomllib.loads(to_toml(RunConfig()))) == RunConfig()


def test_the_torch_free_parts_import_without_torch() -> None:
    code = (
        "import sys, importlib, pkgutil, opengyre\n"
        "for m in pkgutil.walk_packages(opengyre.__path__, 'opengyre.'):\n"
        "    top = m.name.split('.')[1]\n"
        "    heavy = top in ('training',) or 'torch' in m.name or m.name.endswith('make_policy')\n"
        "    if not heavy and m.name != 'opengyre.__main__' and m.name != 'opengyre.quickstart.harness':\n"
        "        importlib.import_module(m.name)\n"
        "bad = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
