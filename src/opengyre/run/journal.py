"""The run's state that must survive a kill: admitted queries, finished executions, committed steps. One SQLite file.

A step is prepared here before its checkpoint is written and counts as committed once a checkpoint of at least its
version exists whole; ``rollback`` drops what was only prepared. So the newest checkpoint alone decides which queries
have been trained, and nothing acknowledged is lost or trained twice.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from opengyre.errors import RecordError
from opengyre.executions.outcome import ExecutionResult

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS queries (
    number INTEGER PRIMARY KEY, query_id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL, split TEXT NOT NULL,
    version INTEGER NOT NULL, complete INTEGER NOT NULL DEFAULT 0, trained_step INTEGER);
CREATE TABLE IF NOT EXISTS executions (
    execution_id TEXT PRIMARY KEY, query_id TEXT NOT NULL, result BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS executions_by_query ON executions (query_id);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, version INTEGER NOT NULL, summary BLOB NOT NULL);
"""

DROPPED = -1  # trained_step of a query that ended without a group


class QueryRow(msgspec.Struct, frozen=True):
    """One admitted query. ``number`` is its place in the admission order; ``version`` counts the steps committed when
    it was admitted; ``trained_step`` is None while no committed step holds it, ``DROPPED`` if none ever will."""

    number: int
    query_id: str
    task_id: str
    split: str
    version: int
    complete: bool
    trained_step: int | None


class Journal:
    """All methods return when the change is durable against a kill of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # survives a kill; a power cut may cost the last moments
            self._db.execute("PRAGMA busy_timeout = 10000")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise RecordError(str(error), where=str(path), right="a run folder on a writable disk") from None

    def _do(self, sql: str, *values: Any) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise RecordError(str(error), where=str(self._path)) from None

    def get(self, key: str) -> str | None:
        """A value that ``put`` stored, or None."""
        row = self._do("SELECT value FROM meta WHERE key = ?", key).fetchone()
        return row[0] if row else None

    def put(self, key: str, value: str) -> None:
        """Remember a value for the whole run."""
        self._do("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def admit(self, query_id: str, task_id: str, split: str, version: int) -> None:
        """A query has been admitted on a weights version."""
        self._do(
            "INSERT INTO queries (query_id, task_id, split, version) VALUES (?, ?, ?, ?)",
            query_id, task_id, split, version,
        )  # fmt: skip

    def finish(self, result: ExecutionResult) -> None:
        """An execution is over, scored or not."""
        self._do(
            "INSERT OR REPLACE INTO executions VALUES (?, ?, ?)",
            result.execution_id, result.query_id, msgspec.json.encode(result),
        )  # fmt: skip

    def complete(self, query_id: str) -> None:
        """All executions of a query are over."""
        self._do("UPDATE queries SET complete = 1 WHERE query_id = ?", query_id)

    def prepare_step(self, step: int, version: int, queries: list[str], summary: dict[str, Any]) -> None:
        """Write a step and the queries it trains; takes effect with the checkpoint of ``version``."""
        self._do("BEGIN IMMEDIATE")
        self._do("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", step, version, msgspec.json.encode(summary))
        for query_id in queries:
            self._do("UPDATE queries SET trained_step = ? WHERE query_id = ?", step, query_id)
        self._do("COMMIT")

    def step_of(self, version: int) -> int:
        """The last step whose weights are ``version`` or older: what a checkpoint of ``version`` proves committed.

        A step without anything trainable has the version of the step before it, and needs no checkpoint of its own.
        """
        return self._do("SELECT coalesce(max(step), 0) FROM steps WHERE version <= ?", version).fetchone()[0]  # type: ignore[no-any-return]

    def rollback(self, step: int) -> None:
        """Drop steps after ``step``: they were prepared, but their checkpoint never became whole."""
        self._do("BEGIN IMMEDIATE")
        self._do("DELETE FROM steps WHERE step > ?", step)
        self._do("UPDATE queries SET trained_step = NULL WHERE trained_step > ?", step)
        self._do("COMMIT")

    def queries(self, split: str) -> list[QueryRow]:
        """Admitted queries of a split in admission order."""
        rows = self._do(
            "SELECT number, query_id, task_id, split, version, complete, trained_step FROM queries "
            "WHERE split = ? ORDER BY number",
            split,
        )
        return [QueryRow(n, q, t, s, v, bool(c), k) for n, q, t, s, v, c, k in rows]

    def results(self, query_id: str) -> list[ExecutionResult]:
        """The finished executions of a query."""
        rows = self._do("SELECT result FROM executions WHERE query_id = ? ORDER BY execution_id", query_id)
        return [msgspec.json.decode(row[0], type=ExecutionResult) for row in rows]

    def steps(self) -> list[dict[str, Any]]:
        """Summaries of the steps, in order."""
        return [msgspec.json.decode(row[0]) for row in self._do("SELECT summary FROM steps ORDER BY step")]

    def drop(self, query_id: str) -> None:
        """A query ended without one scored execution: it is consumed, in no step."""
        self._do("UPDATE queries SET complete = 1, trained_step = ? WHERE query_id = ?", DROPPED, query_id)

    def evaluated(self, name: str, figures: dict[str, Any]) -> None:
        """An evaluation is over."""
        self.put(f"evaluation {name}", msgspec.json.encode(figures).decode())

    def evaluation(self, name: str) -> dict[str, Any] | None:
        """The figures of an evaluation that is over, or None."""
        value = self.get(f"evaluation {name}")
        return None if value is None else msgspec.json.decode(value)

    def close(self) -> None:
        """Close the file."""
        self._db.close()
