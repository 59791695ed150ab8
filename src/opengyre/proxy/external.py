"""Sessions for a trainer of somebody else's: opened, closed with a reward, and handed out as samples.

    open ──▶ base URL and key for a harness ──▶ its calls are recorded ──▶ close(reward) ──▶ samples, tree
                                                                               │
    a proxy that starts again opens what was not closed, under the same URL and key ◀─ stored with the record

A session's key is made of the admin key and its id, so that a harness outlives a restart of the proxy without knowing.
Closed sessions leave memory in the order of their closing; what is asked of them then comes from the record.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec

from opengyre.config import SamplingConfig
from opengyre.errors import ConfigError, RecordError
from opengyre.executions.harness.command import client_variables
from opengyre.executions.outcome import Outcome
from opengyre.export.sample import About, plain
from opengyre.export.source import Choice, Source
from opengyre.proxy.calls import CallDriver
from opengyre.proxy.recall import recall
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.session import Sessions, check_pins
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store, StoredExecution
from opengyre.record.tree import Tree
from opengyre.samples.build import samples_of
from opengyre.samples.select import paths_of, select
from opengyre.watch.tree_json import trained_masks, tree_to_json

KEEP_CLOSED = 256  # sessions: a harness that was not ended hears 409 so long, 404 after
CLOSED = "closed"  # outcome of an execution that was closed without being scored
MODEL = "policy"  # the name of the model that clients are told


class ProxyStore(Store):
    """A record whose unfinished executions may begin again."""

    def begin_execution(self, execution_id: str, meta: dict[str, Any]) -> None:
        """Make an execution known, or let one that was not finished go on."""
        try:
            goes_on = self.execution(execution_id).outcome is None
        except RecordError:
            goes_on = False
        if not goes_on:
            super().begin_execution(execution_id, meta)


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /sessions. ``query_id`` names the group whose executions are compared with each other."""

    execution_id: str | None = None
    query_id: str | None = None
    task_id: str | None = None
    split: Literal["train", "held_out"] = "train"
    pins: dict[str, Any] = {}
    meta: dict[str, Any] = {}


class Closing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /sessions/ID/close. A later one replaces the outcome, so that a reward may come later."""

    outcome: Outcome | None = None
    reward: float | None = None
    checks: dict[str, float] = {}
    detail: str = ""


class External:
    """What the admin door offers.

    Args:
        sessions, driver, store: of the proxy.
        admin_key: makes the sessions' keys.
        pins: of sessions that bring none of their own.
        allows: why no session may sample at a temperature, or None.
        new_id: makes ids of executions that are opened without one.
    """

    def __init__(
        self,
        sessions: Sessions,
        driver: CallDriver,
        store: Store,
        source: Source,
        *,
        admin_key: str,
        pins: SamplingConfig,
        allows: Callable[[float], str | None],
        new_id: Callable[[], str],
    ) -> None:
        self._sessions, self._driver, self._store, self._source = sessions, driver, store, source
        self._admin_key, self._pins, self._allows, self._new_id = admin_key, pins, allows, new_id
        self._closed: deque[str] = deque()

    def reopen(self) -> int:
        """Open what an earlier proxy on this record left open; returns how many."""
        left = [e for e in self._store.executions() if e.outcome is None]
        for stored in left:
            pins = SamplingConfig(**stored.meta.get("pins", {}))
            name = stored.execution_id
            self._open(name, pins, stored.meta)
            tree = self._store.load_tree(name)
            self._sessions.get(name).resume(tree, recall(tree, partial(self._store.messages, name)))
        return len(left)

    def open(self, asked: Opening) -> dict[str, Any]:
        """Open a session. Raises Refusal (400, 409)."""
        pins = self._pins_of(asked.pins)
        execution_id = asked.execution_id or self._new_id()
        query_id = asked.query_id or execution_id
        meta = {**asked.meta, "split": asked.split, "query_id": query_id, "task_id": asked.task_id or ""}
        try:
            self._open(execution_id, pins, {**meta, "pins": msgspec.to_builtins(pins)})
        except RecordError:
            what = f"execution_id: {execution_id} was recorded here before"
            raise Refusal(what, status=409, param="execution_id") from None
        except ConfigError as error:
            taken = execution_id in self._sessions
            raise Refusal(f"execution_id: {error}", status=409 if taken else 400, param="execution_id") from None
        return self.show(execution_id)

    async def close(self, execution_id: str, asked: Closing) -> dict[str, Any]:
        """End a session and store how its execution ended. Returns when its calls are recorded."""
        stored = self._stored(execution_id)
        outcome = _outcome(asked)
        session = self._sessions.get(execution_id) if execution_id in self._sessions else None
        if session is not None:
            if not session.closed:
                self._sessions.close(execution_id)
                self._closed.append(execution_id)
            await session.settled()
        result = {
            "execution_id": execution_id,
            "query_id": stored.meta.get("query_id", execution_id),
            "task_id": stored.meta.get("task_id", ""),
            "outcome": outcome,
            "reward": asked.reward,
            "checks": asked.checks,
            "detail": asked.detail,
            "calls": self._store.execution(execution_id).calls,
            "held_s": session.held.seconds if session is not None else (stored.outcome or {}).get("held_s", 0.0),
        }
        self._store.finish_execution(execution_id, result)
        while len(self._closed) > KEEP_CLOSED:
            self._sessions.forget(self._closed.popleft())
        return self.show(execution_id)

    def forget(self, execution_id: str) -> None:
        """Free a closed session's memory; the record stays. Raises Refusal (409) for an open one."""
        self._stored(execution_id)
        if execution_id in self._sessions:
            if not self._sessions.get(execution_id).closed:
                raise Refusal("is open: close it first", status=409, param="execution_id")
            self._sessions.forget(execution_id)
            self._closed.remove(execution_id)

    def listing(self, state: str | None = None) -> list[dict[str, Any]]:
        """All executions of the record, or those that are ``open`` or ``closed``."""
        if state not in (None, "open", "closed"):
            raise Refusal(f"state: {state!r}; open or closed", param="state")
        rows = [self._row(stored) for stored in self._store.executions()]
        return [row for row in rows if state in (None, row["state"])]

    def show(self, execution_id: str) -> dict[str, Any]:
        """One execution: what clients are told and its calls under way while it is open, its counters, how it ended."""
        row = self._row(self._stored(execution_id))
        session = self._sessions.get(execution_id) if execution_id in self._sessions else None
        if session is not None:
            row["counters"] = dict(vars(session.counters))
            row["unique_tokens"] = session.tree.unique_tokens
            row["leaves"] = len(session.tree.leaves())
            row["held_s"] = session.held.seconds
            if not session.closed:
                base_url = f"{self._sessions.base_url}/x/{execution_id}"
                env = client_variables(base_url, session.key, MODEL)
                row |= {"base_url": base_url, "key": session.key, "model": MODEL, "env": env}
                row["running"] = [
                    {"call_id": live.call_id, "dialect": live.prepared.dialect, "sampled_tokens": len(live.sampled)}
                    for live in session.live.values()
                ]
        return row

    def samples(self, execution_id: str, choice: Choice) -> list[dict[str, Any]]:
        """Token-level samples of a closed execution, as rows of the export. Raises Refusal (409) for an open one."""
        stored = self._stored(execution_id)
        if stored.outcome is None:
            raise Refusal("is open: its history may still grow; close it first", status=409, param="execution_id")
        about = About(
            execution_id=execution_id,
            query_id=stored.meta.get("query_id", execution_id),
            task_id=stored.meta.get("task_id", ""),
            split=stored.meta.get("split", "train"),
            outcome=stored.outcome["outcome"],
            reward=stored.outcome["reward"],
            advantage=None,
        )
        return [plain(item.row()) for item in self._source.of_tree(self._tree(execution_id), about, choice)]

    def tree(self, execution_id: str) -> dict[str, Any]:
        """The trajectory tree as JSON (watch/tree_json.py), with what a default selection would train."""
        stored = self._stored(execution_id)
        tree = self._tree(execution_id)
        roles = assign_roles(tree)
        picks = select(paths_of(tree, roles), j_max=5, run_seed=0, execution_id=execution_id)
        samples = samples_of(tree, picks, execution_id=execution_id, query_id="", advantage=0.0)
        outcome = stored.outcome or {}
        return tree_to_json(
            tree,
            roles,
            trained_masks(samples),
            execution=execution_id,
            task=stored.meta.get("task_id", ""),
            outcome=outcome.get("outcome", "open"),
            reward=outcome.get("reward"),
            decode=self._driver.renderer.decode,
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open(self, execution_id: str, pins: SamplingConfig, meta: Mapping[str, Any]) -> None:
        self._sessions.open(execution_id, pins=pins, meta=meta)
        session = self._sessions.get(execution_id)
        digest = hmac.new(self._admin_key.encode(), execution_id.encode(), hashlib.sha256)
        session.key = f"gyre-{digest.hexdigest()[:40]}"

    def _pins_of(self, asked: dict[str, Any]) -> SamplingConfig:
        try:
            pins = msgspec.convert({**msgspec.to_builtins(self._pins), **asked}, SamplingConfig, strict=True)
        except msgspec.ValidationError as error:
            raise Refusal(f"pins: {error}", param="pins") from None
        try:
            check_pins(pins)
        except ConfigError as error:
            raise Refusal(str(error), param=error.where) from None
        if why := self._allows(pins.temperature):
            raise Refusal(f"pins.temperature: {pins.temperature}: {why}", param="pins.temperature")
        return pins

    def _stored(self, execution_id: str) -> StoredExecution:
        try:
            return self._store.execution(execution_id)
        except RecordError:
            raise Refusal(f"no such execution: {execution_id}", status=404, kind="not_found_error") from None

    def _tree(self, execution_id: str) -> Tree:
        if execution_id in self._sessions:
            return self._sessions.get(execution_id).tree
        return self._store.load_tree(execution_id)

    def _row(self, stored: StoredExecution) -> dict[str, Any]:
        outcome, meta = stored.outcome or {}, dict(stored.meta)
        return {
            "execution_id": stored.execution_id,
            "state": "open" if stored.outcome is None else "closed",
            "query_id": meta.pop("query_id", stored.execution_id),
            "task_id": meta.pop("task_id", ""),
            "split": meta.pop("split", "train"),
            "pins": meta.pop("pins", {}),
            "meta": meta,
            "calls": stored.calls,
            "outcome": outcome.get("outcome"),
            "reward": outcome.get("reward"),
        }


def _outcome(asked: Closing) -> str:
    """The outcome to store. Raises Refusal (400) when outcome and reward contradict each other."""
    if asked.reward is None:
        if asked.outcome is not None and asked.outcome.scored:
            raise Refusal(f"reward: is missing; outcome {asked.outcome.value} is scored", param="reward")
        return CLOSED if asked.outcome is None else asked.outcome.value
    if not abs(asked.reward) < float("inf"):
        raise Refusal(f"reward: {asked.reward}; a finite number", param="reward")
    if asked.outcome is not None and not asked.outcome.scored:
        raise Refusal(f"reward: {asked.reward} with outcome {asked.outcome.value}, which is not scored", param="reward")
    return (asked.outcome or Outcome.FINISHED).value
