"""Objects by name: from modules, from files, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from opengyre import named
from opengyre.errors import ConfigError


def test_from_a_module_and_from_a_file_with_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("ANSWER = 42")
    (tmp_path / "named_here.py").write_text("from beside_it import ANSWER\ndef ask():\n    return ANSWER\n")
    assert named.load("json:dumps", "key")([]) == "[]"
    assert named.load(f"{tmp_path}/named_here.py:ask", "key")() == 42
    assert named.load(f"{tmp_path}/named_here.py:ask", "key") is named.load(f"{tmp_path}/named_here.py:ask", "key")


def test_two_files_of_one_name_are_not_taken_for_each_other(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text(f"WHICH = {folder!r}")
    assert named.load(f"{tmp_path}/one/same_name.py:WHICH", "key") == "one"
    with pytest.raises(ConfigError, match=r"another module is called same_name"):
        named.load(f"{tmp_path}/two/same_name.py:WHICH", "key")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing", r"key: 'nothing' \(module:function, or path/to/file.py:function\)"),
        (":f", "module:function"),
        ("json:", "module:function"),
        ("json:none", "has no attribute 'none'"),
        ("no_such_module:f", "No module named"),
        ("none.py:f", "no such file: none.py"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        named.load(name, "key")
