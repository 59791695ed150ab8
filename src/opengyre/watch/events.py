"""The run's event log: one JSON object a line in ``events.jsonl``; views and reports are made from it alone.

Every event has ``t`` (seconds since the run first started, monotonic across resumes) and ``kind``. The kinds:

=========== =========================================================================================================
run         state (start|resume|end), name, policy, steps, cells [{cell, core}], seed, learning_rate, reason
cell        cell, state (a CellState value), reason, pid
switch      cell, direction (rollout>train|train>rollout), phases {drain_s, release_s, pull_s, ...}, total_s,
            moved_calls, kv_tokens, ok
waterlevel  queued, running, rollout_cells, slots
query       query, task, state (admitted|complete|trained|dropped), version, step
execution   execution, query, task, split (train|held_out), state (queued|running|scoring|done); when done: outcome,
            reward, calls, moves, sampled_tokens, prompt_tokens, leaves {role: n}, agent_s, held_s, queued_s, score_s
micro_step  step, micro, cell, state (claimed|done|requeued|pushed), tokens, seconds
step        step, version, loss, grad_norm, reward_mean, pass_rate, executions, groups, degenerate, excluded, samples,
            tokens, staleness_max, ratio_max, clip_fraction, seconds, step_s (since the last step)
eval        version, pass_rate, reward_mean, executions, tasks
decision    policy, actions [{cell, role}], reason, snapshot {...}
note        level (info|warning|error), text
=========== =========================================================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from opengyre.errors import RecordError

Listener = Callable[[dict[str, Any]], None]


class EventLog:
    """Appends events to a file and tells listeners (terminal view, metrics). A torn last line is cut when reopened."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        start = 0.0
        if path.exists():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) != len(data):
                path.write_bytes(whole)
            if whole:
                start = msgspec.json.decode(whole.rstrip(b"\n").rsplit(b"\n", 1)[-1])["t"]
        self._file = path.open("ab", buffering=0)
        self._clock, self._offset = clock, start - clock()
        self._listeners: list[Listener] = []

    @property
    def now(self) -> float:
        """Seconds on the run's clock."""
        return self._clock() + self._offset

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with every further event."""
        self._listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append one event and pass it to the listeners. Raises RecordError when it cannot be written (a full disk)."""
        event = {"t": round(self.now, 4), "kind": kind, **fields}
        try:
            self._file.write(msgspec.json.encode(event) + b"\n")
        except OSError as error:
            raise RecordError(f"cannot be written: {error.strerror}", where=str(self._path)) from None
        for listener in self._listeners:
            listener(event)
        return event

    def close(self) -> None:
        """Close the file; listeners stay."""
        self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """All whole events of a log, in order."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line)
