"""Objects by name, as configs and options give them: ``module:attribute``, or ``path/to/file.py:attribute``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from opengyre.errors import ConfigError, boundary

RIGHT = "module:function, or path/to/file.py:function"


def load(name: str, where: str) -> Any:
    """The object called ``name``; ``where`` is the config key or option it stands in.

    A file is imported as it would be run: what lies beside it can be imported from it.

    Raises:
        ConfigError: not of that form, or no such module, file or attribute, or it breaks when imported.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"{name!r}", where=where, right=RIGHT)
    with boundary(ConfigError, f"{where} {name}"):
        found = _file(Path(module), where) if module.endswith(".py") else importlib.import_module(module)
        return getattr(found, attribute)


def _file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"no such file: {path}", where=where)
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    known = sys.modules.get(path.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").absolute() == path.absolute():
        return known
    if known is not None:
        raise ConfigError(f"another module is called {path.stem}", where=where, right=f"another name than {path.name}")
    return importlib.import_module(path.stem)
