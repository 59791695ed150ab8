"""``opengyre train``: from a config to a finished run and its report."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import TextIO

from opengyre.errors import OpenGyreError, RecordError
from opengyre.paced.pace import pace_of
from opengyre.run.conductor import Conductor
from opengyre.run.parts import assemble_parts
from opengyre.run.preflight import Prepared, claim_run_dir
from opengyre.run.summary import Summary
from opengyre.watch.events import EventLog, read
from opengyre.watch.metrics import MetricsWriter
from opengyre.watch.report import write_report
from opengyre.watch.terminal import make_view


def train(prepared: Prepared, output: TextIO) -> Summary:
    """Run to the end, showing the run on ``output``; whatever happens, what was committed stays and can be resumed.

    Raises:
        OpenGyreError: what broke for good.
        KeyboardInterrupt: the user or the system ended it (SIGINT, SIGTERM).
    """
    lock = claim_run_dir(prepared)
    try:
        return asyncio.run(_train(prepared, output))
    finally:
        lock.close()
        if prepared.config.watch.report and (prepared.run_dir / "events.jsonl").exists():
            with contextlib.suppress(OSError):  # a report can be made later; it must not hide how the run ended
                write_report(prepared.run_dir)


async def _train(prepared: Prepared, output: TextIO) -> Summary:
    config, run_dir = prepared.config, prepared.run_dir
    log = run_dir / "events.jsonl"
    past = list(read(log)) if log.exists() else []
    events = EventLog(log, clock=pace_of(config.paced).now)
    with contextlib.ExitStack() as stack:
        stack.callback(events.close)
        view = make_view(config.watch, output, past)
        stack.callback(view.close)
        metrics = MetricsWriter(run_dir / "metrics.jsonl", past)
        stack.callback(metrics.close)
        events.listen(view)
        events.listen(metrics)
        events.emit(
            "run",
            state="resume" if prepared.resumed else "start",
            name=config.name,
            policy=config.schedule.policy,
            steps=config.steps,
            seed=config.seed,
            learning_rate=config.train.learning_rate,
            cells=[{"cell": name, "core": core} for name, core in config.cells.names()],
        )
        reason = "stopped"
        try:
            with _stop_on_signals():
                async with assemble_parts(prepared, events, past) as parts:
                    summary = await Conductor(parts).run()
            reason = "done"
            return summary
        except OpenGyreError as error:
            reason = str(error)
            raise
        except asyncio.CancelledError:
            reason = "interrupted"
            raise KeyboardInterrupt from None
        finally:
            with contextlib.suppress(RecordError):  # what is wrong with the disk has been said
                events.emit("run", state="end", reason=reason)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM cancel the run, which then ends its parts in order."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
