"""Durability: every answered call of a run, in one SQLite file, before its last byte reaches the harness.

    proxy ── put(execution, call) ──▶ one INSERT, committed ──▶ tree.commit(call) ──▶ the rest of the reply

``put`` is one statement in autocommit mode: there is no transaction that could span an await or be half written, and
when it returns the call survives the death of this process (``synchronous=NORMAL``) or of the machine (``FULL``).
One process has one writing connection, shared under a lock; WAL lets others read meanwhile. A call refers to the tree
by (call, depth), never by node number, so rows stay true in whatever order concurrent calls were put and committed.
Bytes grow with unique tokens: a row holds a call's own tokens only.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from opengyre.errors import RecordError, boundary
from opengyre.record.call import KEY_BYTES, CommittedCall
from opengyre.record.tree import Tree
from opengyre.record.types import CallMeta, Finish, Span

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0  # longer than any checkpoint or other process's statement; then "locked" is a real error
MARK = struct.Struct(f"<{KEY_BYTES}si")
ZLIB_LEVEL = 1  # ids shrink by half at 1, hardly more at 9, and this runs before the reply is delivered

SCHEMA = f"""
CREATE TABLE executions (
    execution_id TEXT PRIMARY KEY,
    meta TEXT NOT NULL,                -- JSON, given when it began
    outcome TEXT                       -- JSON, given when it was finished; NULL until then
) WITHOUT ROWID;
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,           -- order of durability
    execution_id TEXT NOT NULL REFERENCES executions,
    call_id TEXT NOT NULL,
    via TEXT NOT NULL,                 -- the prompt shares the first `depth` tokens of this call's path
    depth INTEGER NOT NULL,
    shared_messages INTEGER NOT NULL,
    usable INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,    -- of the tail
    sampled_tokens INTEGER NOT NULL,
    prompt_digest BLOB NOT NULL,       -- of the whole prompt, as the engine saw it
    sampled_digest BLOB NOT NULL,
    reply_key BLOB,
    marks BLOB NOT NULL,               -- (16-byte key, int32 end) per new message
    spans TEXT NOT NULL,               -- JSON [tokens, version, cell, trainable] per sampled span
    ids BLOB NOT NULL,                 -- int32, tail then sampled, packed
    logprobs BLOB NOT NULL,            -- float32, packed
    meta BLOB NOT NULL,                -- CallMeta as JSON, packed
    messages BLOB                      -- the new messages as JSON, packed; for people, never for training
);
CREATE UNIQUE INDEX call_of_execution ON calls (execution_id, call_id);
PRAGMA user_version = {SCHEMA_VERSION};
"""


@dataclass(frozen=True, slots=True)
class StoredExecution:
    """What is known of an execution besides its calls. ``outcome`` is None while it runs, or if its run was killed."""

    execution_id: str
    meta: dict[str, Any]
    outcome: dict[str, Any] | None
    calls: int


class Store:
    """The calls of a run. Made by ``Store.open``; every method may be called from any thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, synchronous: Literal["NORMAL", "FULL"] = "NORMAL", readonly: bool = False) -> Store:
        """Open or create the file. ``readonly`` opens a run that another process may be writing.

        Raises:
            RecordError: it cannot be opened, or was written by another version of this program.
        """
        if readonly and not path.exists():
            raise RecordError("no such record of calls", where=str(path))
        with _typed(path):
            uri = f"{path.absolute().as_uri()}?mode={'ro' if readonly else 'rwc'}"
            db = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            db.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
            db.execute("PRAGMA foreign_keys = ON")
            if not readonly:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute(f"PRAGMA synchronous = {synchronous}")
                _create(db)
            (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            db.close()
            raise RecordError(f"schema {version}", where=str(path), right=f"schema {SCHEMA_VERSION}")
        return cls(path, db)

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin_execution(self, execution_id: str, meta: dict[str, Any]) -> None:
        """Make an execution known; its calls can be put from now on. Raises RecordError if it is known already."""
        self._write("INSERT INTO executions VALUES (?, ?, NULL)", (execution_id, _json(meta)), execution_id)

    def put(self, execution_id: str, call: CommittedCall, messages: Any | None = None) -> None:
        """Store a call; returns when it is durable. ``messages`` (any JSON value) are its new ones, for the viewer.

        Raises:
            RecordError: unknown execution, call stored already, full disk, or another process holds the file too long.
                Nothing of the call is stored then.
        """
        sampled = [span.ids for span in call.sampled]
        logprobs = [span.logprobs for span in call.sampled if span.logprobs is not None]
        row = (
            execution_id,
            call.meta.call_id,
            call.attach.via,
            call.attach.depth,
            call.attach.n_messages,
            int(call.usable),
            len(call.tail_ids),
            sum(map(len, sampled)),
            call.prompt_digest,
            call.sampled_digest,
            call.reply_key,
            b"".join(MARK.pack(key, end) for key, end in call.marks),
            _json([[len(s), s.version, s.cell, s.trainable] for s in call.sampled]),
            _pack(np.concatenate([call.tail_ids, *sampled]).astype("<i4").tobytes()),
            _pack(np.concatenate(logprobs).astype("<f4").tobytes() if logprobs else b""),
            _pack(_json(asdict(call.meta)).encode()),
            None if messages is None else _pack(_json(messages).encode()),
        )
        marks = ", ".join("?" * (len(row) + 1))
        self._write(f"INSERT INTO calls VALUES ({marks})", (None, *row), f"{execution_id} {call.meta.call_id}")

    def finish_execution(self, execution_id: str, outcome: dict[str, Any]) -> None:
        """Store how an execution ended and what was selected from it; a later call replaces it."""
        done = self._write(
            "UPDATE executions SET outcome = ? WHERE execution_id = ?", (_json(outcome), execution_id), execution_id
        )
        if not done:
            raise RecordError("unknown execution", where=execution_id)

    # -- reading -----------------------------------------------------------------------------------------------------

    def executions(self) -> list[StoredExecution]:
        """All executions, by id."""
        rows = self._read(
            "SELECT execution_id, meta, outcome, (SELECT count(*) FROM calls c WHERE c.execution_id = e.execution_id)"
            " FROM executions e ORDER BY execution_id"
        )
        return [_execution(*row) for row in rows]

    def execution(self, execution_id: str) -> StoredExecution:
        """One execution. Raises RecordError if it is unknown."""
        rows = self._read(
            "SELECT execution_id, meta, outcome, (SELECT count(*) FROM calls WHERE execution_id = ?1)"
            " FROM executions WHERE execution_id = ?1",
            execution_id,
        )
        if not rows:
            raise RecordError(f"unknown execution {execution_id}", where=str(self.path))
        return _execution(*rows[0])

    def load_tree(self, execution_id: str, *, verify: bool = True) -> Tree:
        """Grow the tree of an execution again from its stored calls; see ``Tree`` for ``verify``.

        Raises:
            RecordError: unknown execution, or rows that contradict each other.
        """
        self.execution(execution_id)
        tree = Tree(verify=verify)
        for row in self._read(
            "SELECT via, depth, shared_messages, usable, prompt_tokens, prompt_digest, sampled_digest, reply_key,"
            " marks, spans, ids, logprobs, meta FROM calls WHERE execution_id = ? ORDER BY seq",
            execution_id,
        ):
            with boundary(RecordError, f"{self.path}: {execution_id}"):
                tree.commit(_call(tree, row))
        return tree

    def messages(self, execution_id: str, call_id: str) -> Any | None:
        """The new messages stored with a call, or None."""
        rows = self._read("SELECT messages FROM calls WHERE execution_id = ? AND call_id = ?", execution_id, call_id)
        return json.loads(_unpack(rows[0][0])) if rows and rows[0][0] is not None else None

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock, _typed(self.path):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, statement: str, values: tuple[Any, ...], where: str) -> int:
        with self._lock, _typed(self.path, where):
            return self._db.execute(statement, values).rowcount

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, _typed(self.path):
            return self._db.execute(query, values).fetchall()


def _create(db: sqlite3.Connection) -> None:
    """Make the tables of a new file, once, whoever else opens it at the same time."""
    if db.execute("PRAGMA user_version").fetchone() != (0,):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        if db.execute("PRAGMA user_version").fetchone() == (0,):
            for statement in SCHEMA.split(";\n"):
                db.execute(statement)
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _call(tree: Tree, row: tuple[Any, ...]) -> CommittedCall:
    via, depth, shared, usable, prompt_tokens, seen, sampled_digest, reply_key, marks, spans, ids, logprobs, meta = row
    told = json.loads(_unpack(meta))
    about = CallMeta(**{**told, "finish": Finish(told["finish"]), "tool_names": tuple(told["tool_names"])})
    tokens = np.frombuffer(_unpack(ids), "<i4").astype(np.int32)
    scores = np.frombuffer(_unpack(logprobs), "<f4").astype(np.float32)
    sampled, at = [], 0
    for length, version, cell, trainable in json.loads(spans):
        part = tokens[prompt_tokens + at : prompt_tokens + at + length]
        sampled.append(Span(part, scores[at : at + length], version, cell, trainable))
        at += length
    return CommittedCall(
        attach=tree.at(via, depth, shared, about.fork_reason),
        tail_ids=tokens[:prompt_tokens],
        marks=tuple(
            (marks[i : i + 16], int.from_bytes(marks[i + 16 : i + 20], "little")) for i in range(0, len(marks), 20)
        ),
        sampled=tuple(sampled),
        reply_key=reply_key,
        meta=about,
        prompt_digest=seen,
        sampled_digest=sampled_digest,
        usable=bool(usable),
    )


def _execution(execution_id: str, meta: str, outcome: str | None, calls: int) -> StoredExecution:
    return StoredExecution(execution_id, json.loads(meta), json.loads(outcome) if outcome else None, calls)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # ASCII: lone surrogates, which harnesses do send, survive


def _pack(raw: bytes) -> bytes:
    """Raw bytes behind a 0, or compressed behind a 1 where that pays."""
    small = zlib.compress(raw, ZLIB_LEVEL)
    return b"\1" + small if len(small) < len(raw) else b"\0" + raw


def _unpack(packed: bytes) -> bytes:
    return zlib.decompress(packed[1:]) if packed[:1] == b"\1" else packed[1:]


@contextmanager
def _typed(path: Path, where: str = "") -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as cause:
        raise RecordError(f"{cause} {where}".strip(), where=str(path)) from cause
