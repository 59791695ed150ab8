"""Engines that users bring: made by a function that a command line or config names."""

from __future__ import annotations

from collections.abc import Callable

from opengyre import named
from opengyre.config import RunConfig
from opengyre.proxy.render import Renderer
from opengyre.rollout.base import RolloutEngine

MakeEngine = Callable[[RunConfig, Renderer], RolloutEngine]


def load_engine(name: str, where: str = "--engine") -> MakeEngine:
    """A maker of engines by ``module:function`` or ``path/to/file.py:function``, called with (config, renderer).

    Raises:
        ConfigError: no such module, file or function, or it does not load.
    """
    made: MakeEngine = named.load(name, where)
    return made
