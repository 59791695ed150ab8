"""What the user sees while a run goes: a live view on a terminal, plain lines elsewhere.

    conductor ── event ──▶ LiveView.__call__ ── fold, under a lock ──▶ RunState
                                                                        ▲
    rich refresh thread, 4 times a second ── draw, under the lock ──────┘

The view never waits for the run nor the run for the view: folding takes microseconds, drawing happens on rich's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

from opengyre.config import WatchConfig
from opengyre.watch.lines import LineView
from opengyre.watch.screen import screen
from opengyre.watch.state import RunState

REFRESH_HZ = 4  # faster is not readable and costs a core's time


class View(Protocol):
    """A listener that shows the run."""

    def __call__(self, event: dict[str, Any]) -> None:
        """Take notice of one event."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was, with the last picture on it."""
        ...


def make_view(config: WatchConfig, stream: TextIO, past: Iterable[dict[str, Any]] = ()) -> View:
    """The view that suits ``stream``: live on a terminal that can show it, lines otherwise; ``config.live`` decides.

    ``past`` are the events of a resumed run's earlier lives, so that its steps and evaluations are known.
    """
    able = stream.isatty() and "utf" in (stream.encoding or "").lower()
    console = Console(file=stream, force_terminal=True if config.live == "on" else None, highlight=False)
    if config.live == "on" or (config.live == "auto" and able and not console.is_dumb_terminal):
        return LiveView(console, past)
    return LineView(stream, line_every_s=config.line_every_s, past=past)


class LiveView:
    """Redraws in place; scrolls nothing and leaves its last picture when closed."""

    def __init__(self, console: Console, past: Iterable[dict[str, Any]] = ()) -> None:
        self.state = RunState(past)
        self._lock = threading.Lock()
        self._seen = time.monotonic()
        self._live = Live(self, console=console, screen=False, refresh_per_second=REFRESH_HZ, redirect_stdout=False)
        self._live.start()

    def __call__(self, event: dict[str, Any]) -> None:
        """Fold the event; the next refresh shows it."""
        with self._lock:
            self.state.apply(event)
            self._seen = time.monotonic()

    def close(self) -> None:
        """Draw a last time and give the terminal back."""
        with suppress(OSError, ValueError):  # a terminal that went away must not end the run
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            running = self.state.status == "running"
            now = self.state.t + (time.monotonic() - self._seen if running else 0.0)
            yield screen(self.state, now, options.max_width, options.size.height)
