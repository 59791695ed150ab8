"""Puts this folder on the import path: what several test files share lives here as plain modules.

``pytest --update-golden`` rewrites golden files instead of comparing; read the difference before keeping it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compares a text with a file, byte by byte; writes the file first with ``--update-golden``."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; pytest --update-golden rewrites it"

    return check
