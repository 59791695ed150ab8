"""Durability: every answered call of a run, in one SQLite file, before its last byte reaches the harness.

    proxy ── submit(execution, call) ──▶ writer thread: all that wait, in one transaction ──▶ committed
                                                                                                 │ future
                                                          the rest of the reply ◀── tree.commit(call)

When a call's future is done it survives the death of this process (``synchronous=NORMAL``) or of the machine
(``FULL``). Calls that arrive while others are being written share the next transaction; one that cannot be stored fails
alone, and if the transaction fails each is written by itself.
One process has one writing connection, shared under a lock; WAL lets others read meanwhile. A call refers to the tree
by (call, depth), never by node number, so rows stay true in whatever order concurrent calls were put and committed.
Bytes grow with unique tokens: a row holds a call's own tokens only.
"""

from __future__ import annotations

import json
import queue
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import numpy as np

from opengyre.errors import RecordError, boundary
from opengyre.record.call import KEY_BYTES, CommittedCall
from opengyre.record.tree import Tree
from opengyre.record.types import CallMeta, Finish, Span

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0  # longer than any checkpoint or other process's statement; then "locked" is a real error
MARK = struct.Struct(f"<{KEY_BYTES}si")
BATCH = 256  # calls in one transaction at most: none waits for more than some ten milliseconds of others
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
INSERT = f"INSERT INTO calls VALUES ({', '.join('?' * 18)})"


@dataclass(frozen=True, slots=True)
class StoredExecution:
    """What is known of an execution besides its calls. ``outcome`` is None while it runs, or if its run was killed."""

    execution_id: str
    meta: dict[str, Any]
    outcome: dict[str, Any] | None
    calls: int


@dataclass(frozen=True, slots=True)
class _Put:
    """A call on its way into the file."""

    execution_id: str
    call: CommittedCall
    messages: Any | None
    done: Future[None]

    def row(self) -> tuple[Any, ...] | None:
        """Values of ``INSERT``; None if it cannot be made, and then ``done`` says why."""
        try:
            with boundary(RecordError, f"{self.execution_id} {self.call.meta.call_id}"):
                return _row(self.execution_id, self.call, self.messages)
        except RecordError as error:
            self.done.set_exception(error)
            return None


class Store:
    """The calls of a run. Made by ``Store.open``; every method may be called from any thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[_Put | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._closed = False

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
        """``submit``, and wait until it is durable."""
        self.submit(execution_id, call, messages).result()

    def submit(self, execution_id: str, call: CommittedCall, messages: Any | None = None) -> Future[None]:
        """Store a call; the future is done when it is durable. ``messages`` (any JSON value) are its new ones, for the
        viewer.

        The future raises RecordError: unknown execution, call stored already, full disk, a file that is closed, or that
        another process holds too long. Nothing of the call is stored then.
        """
        put = _Put(execution_id, call, messages, Future())
        with self._lock:
            closed = self._closed
            if not closed:
                self._waiting.put(put)
                if self._writer is None:
                    self._writer = threading.Thread(
                        target=self._write_calls, name=f"writer {self.path.name}", daemon=True
                    )
                    self._writer.start()
        if closed:
            put.done.set_exception(RecordError("is closed", where=str(self.path)))
        return put.done

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
        """Write what was submitted and close the file. Idempotent."""
        with self._lock:
            self._closed = True
            writer, self._writer = self._writer, None
        if writer is not None:
            self._waiting.put(None)
            writer.join()
        with self._lock, _typed(self.path):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_calls(self) -> None:
        """The writer thread: everything that waits, in one transaction, again and again."""
        ended = False
        while not ended:
            puts: list[_Put] = []
            item = self._waiting.get()
            while item is not None:
                puts.append(item)
                if self._waiting.empty() or len(puts) == BATCH:
                    break
                item = self._waiting.get()
            ended = item is None
            self._write_batch([(put, row) for put in puts if (row := put.row()) is not None])

    def _write_batch(self, batch: list[tuple[_Put, tuple[Any, ...]]]) -> None:
        failed: dict[int, RecordError] = {}
        try:
            if len(batch) > 1:
                with self._lock, _typed(self.path):
                    failed = self._in_one_transaction([row for _, row in batch])
            else:
                failed = self._one_by_one(batch)
        except RecordError:  # of the transaction, which is rolled back
            failed = self._one_by_one(batch)
        for i, (put, _) in enumerate(batch):
            if i in failed:
                put.done.set_exception(failed[i])
            else:
                put.done.set_result(None)

    def _in_one_transaction(self, rows: list[tuple[Any, ...]]) -> dict[int, RecordError]:
        """Raises sqlite3.Error when nothing was stored."""
        failed = {}
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for i, row in enumerate(rows):
                try:
                    self._db.execute(INSERT, row)
                except sqlite3.IntegrityError as cause:  # undoes this statement alone
                    failed[i] = RecordError(f"{cause} {row[1]} {row[2]}", where=str(self.path))
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return failed

    def _one_by_one(self, batch: list[tuple[_Put, tuple[Any, ...]]]) -> dict[int, RecordError]:
        failed = {}
        for i, (put, row) in enumerate(batch):
            try:
                self._write(INSERT, row, f"{put.execution_id} {put.call.meta.call_id}")
            except RecordError as error:
                failed[i] = error
        return failed

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


def _row(execution_id: str, call: CommittedCall, messages: Any | None) -> tuple[Any, ...]:
    sampled = [span.ids for span in call.sampled]
    logprobs = [span.logprobs for span in call.sampled if span.logprobs is not None]
    return (
        None,
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
        _pack(_json(call.meta).encode()),
        None if messages is None else _pack(_json(messages).encode()),
    )


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
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half a surrogate pair: some harnesses send it
        return json.dumps(value, separators=(",", ":"), default=msgspec.structs.asdict)


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
