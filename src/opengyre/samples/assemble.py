"""Which groups go into which step, and how far rollout may run ahead.

    admissible ─▶ admit ─▶ (executions run) ─▶ complete ─▶ take ─▶ … step_full ─▶ commit ─▶ version + 1
                                          └─▶ drop: the place goes back to admissible

A step takes exactly ``queries_per_step`` (q) groups. A query admitted on version a is *due* at step a + max_staleness
(s): all its tokens are sampled on versions >= a, so trained by then it is at most s versions old. A completed group
joins the open step at once, as long as those that are due earlier keep their places.

Let t be the open step, k the groups it has taken, P(d) the pending groups (admitted, neither taken nor dropped) due at
step d or before. The object keeps one invariant, which is Hall's condition for "every group has a place in time":

    H:  P(d) <= (d - t + 1) * q - k     for every d >= t

- *admit* on version a keeps it: it is allowed only while all pending <= (a + s - t + 1) * q - k, less one; it adds to
  P(d) for d >= a + s alone, where P(d) never exceeds all pending and the right side only grows.
- *complete, drop, readmit* keep it: P never grows.
- *take* of a group due at e lowers the right side by 1 everywhere and P(d) by 1 for d >= e; for d < e it is checked.
- *commit* happens at k = q: k := 0, t := t + 1 leaves the right side as it was, and H at d = t said P(t) <= 0: nothing
  pending is overdue. So no group is ever trained beyond its bound.

No deadlock: while the step has room, either something pending is still running (and will complete or be dropped), or
all pending is completed and the earliest due of it may join (the check is empty), or nothing is pending: then
admissible is (s + 1) * q - k > 0. The count is relative to what is pending, so it cannot go wrong across a resume
(field case C07). Keeping places only for the groups due at t would not do once s >= 2: two groups due at t + 1 may be
left with one place.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from opengyre.errors import ConfigError, TrainingError


class Pending(msgspec.Struct):
    """One admitted query that no committed step holds. ``order``: the how-manieth to complete; None while it runs."""

    query_id: str
    due: int  # the last step that may train it
    order: int | None = None


class AssemblerState(msgspec.Struct):
    """All that a resume needs. Queries of a step that never committed are pending again."""

    version: int = 0
    pending: list[Pending] = []
    admitted: int = 0  # queries ever admitted
    dropped: int = 0  # queries that ended without a group to train
    trained: int = 0  # queries in committed steps


class Assembler:
    """Admission and step assembly of one run; pure, driven by the conductor.

    Args:
        queries_per_step: groups that one step takes, exactly.
        max_staleness: version at training - oldest version in the sample, at most.
        steps: number of steps of the whole run; nothing is admitted that no step could train. None: endless.
        state: from ``state()`` of an earlier process.

    Raises:
        ConfigError: the restored queries cannot all be trained in time, e.g. max_staleness was lowered.
    """

    def __init__(
        self,
        queries_per_step: int,
        max_staleness: int,
        *,
        steps: int | None = None,
        state: AssemblerState | None = None,
    ) -> None:
        state = state or AssemblerState()
        self._q, self._s, self._steps = queries_per_step, max_staleness, steps
        self._version = state.version
        self._pending = {p.query_id: Pending(p.query_id, p.due, p.order) for p in state.pending}
        self._taken: dict[str, Pending] = {}  # of the open step, in the order they joined
        self._orders = 1 + max((p.order for p in state.pending if p.order is not None), default=-1)
        self.admitted, self.dropped, self.trained = state.admitted, state.dropped, state.trained
        self._due_by: dict[int, int] = {}  # due -> pending queries due then
        for pending in self._pending.values():
            self._due_by[pending.due] = self._due_by.get(pending.due, 0) + 1
        if not self._feasible():
            raise ConfigError(
                f"{len(self._pending)} unfinished queries cannot all be trained in time from version {self._version}",
                where="schedule.max_staleness, samples.queries_per_step",
                right="resume with the values the run was started with",
            )

    @property
    def version(self) -> int:
        """The current weights version; also the number of the open step."""
        return self._version

    @property
    def step_groups(self) -> list[str]:
        """Queries in the open step, in the order in which they joined."""
        return list(self._taken)

    @property
    def step_full(self) -> bool:
        """True once no further group joins the open step."""
        return len(self._taken) == self._q

    @property
    def missing(self) -> int:
        """Groups that the open step still waits for."""
        return self._q - len(self._taken)

    @property
    def running(self) -> list[str]:
        """Queries admitted whose executions are not all over."""
        return [p.query_id for p in self._pending.values() if p.order is None]

    @property
    def ready(self) -> list[str]:
        """Completed queries that wait for a later step, in the order in which they completed."""
        return [p.query_id for p in self._completed()]

    @property
    def waiting(self) -> int:
        """How many these are."""
        return len([p for p in self._pending.values() if p.order is not None])

    def admissible(self, serving: int | None = None) -> int:
        """How many queries may be admitted now.

        ``serving`` is the oldest version that a cell could sample a new query on (None: the current one). It is below
        the current version while cells still pull, and makes what is admitted then due earlier.
        """
        room = (self._floor(serving) + self._s - self._version + 1) * self._q
        if self._steps is not None:
            room = min(room, (self._steps - self._version) * self._q)
        return max(0, room - len(self._taken) - len(self._pending))

    def admit(self, query_id: str, serving: int | None = None) -> None:
        """Note that a query starts. Raises TrainingError beyond ``admissible`` or for an id already in progress."""
        if query_id in self._pending or query_id in self._taken:
            raise TrainingError("is already in progress", where=f"query {query_id}")
        if self.admissible(serving) <= 0:
            raise TrainingError(
                f"would run ahead of version {self._version} by more than {self._s}",
                where=f"query {query_id}",
                right="admit only while admissible() > 0",
            )
        self._add(Pending(query_id, self._floor(serving) + self._s))
        self.admitted += 1

    def readmit(self, query_id: str, serving: int | None = None) -> None:
        """A running query starts over and nothing sampled for it so far will be trained (its process was lost)."""
        pending = self._running(query_id)
        self._remove(pending)
        self._add(Pending(query_id, max(pending.due, self._floor(serving) + self._s)))

    def complete(self, query_id: str, oldest_version: int | None = None) -> bool:
        """All executions of a query are over and it has a group.

        ``oldest_version`` is the oldest in its samples, where known: older than the admission's, it makes the group due
        earlier. Returns False, and drops the query, if it can then not be trained in time; True otherwise.
        """
        pending = self._running(query_id)
        if oldest_version is not None and oldest_version + self._s < pending.due:
            self._remove(pending)
            self._add(Pending(query_id, oldest_version + self._s))
            if not self._feasible():
                self.drop(query_id)
                return False
        self._pending[query_id].order = self._orders
        self._orders += 1
        return True

    def drop(self, query_id: str) -> None:
        """A query ended with no group at all. It is consumed (not tried again this epoch); its place is given back."""
        self._remove(self._running(query_id))
        self.dropped += 1

    def take(self) -> list[str]:
        """Let completed groups join the open step; returns those that newly did. Call after complete and commit."""
        joined: list[str] = []
        while not self.step_full:
            group = next((p for p in self._completed() if self._may_join(p)), None)
            if group is None:
                break
            self._remove(group)
            self._taken[group.query_id] = group
            joined.append(group.query_id)
        return joined

    def commit(self) -> int:
        """The open step was applied: returns the new version. Raises TrainingError while the step is not full."""
        if not self.step_full:
            raise TrainingError(f"has {len(self._taken)} of {self._q} groups", where=f"step {self._version}")
        self.trained += len(self._taken)
        self._taken.clear()
        self._version += 1
        return self._version

    def state(self) -> AssemblerState:
        """What a resume needs; the open step's groups count as completed and pending, for it has not committed."""
        pending = [Pending(p.query_id, p.due, p.order) for p in (*self._taken.values(), *self._pending.values())]
        return AssemblerState(self._version, pending, self.admitted, self.dropped, self.trained)

    def _floor(self, serving: int | None) -> int:
        return self._version if serving is None else min(serving, self._version)

    def _completed(self) -> list[Pending]:
        done = [(p.order, p) for p in self._pending.values() if p.order is not None]
        return [p for _, p in sorted(done, key=lambda pair: pair[0])]

    def _running(self, query_id: str) -> Pending:
        pending = self._pending.get(query_id)
        if pending is None or pending.order is not None:
            raise TrainingError("is not in progress", where=f"query {query_id}", right="a query that was admitted")
        return pending

    def _add(self, pending: Pending) -> None:
        self._pending[pending.query_id] = pending
        self._due_by[pending.due] = self._due_by.get(pending.due, 0) + 1

    def _remove(self, pending: Pending) -> None:
        del self._pending[pending.query_id]
        self._due_by[pending.due] -= 1
        if not self._due_by[pending.due]:
            del self._due_by[pending.due]

    def _slack(self) -> Iterator[tuple[int, int]]:
        """(d, places - P(d)) for each d at which P grows; H says that none is negative."""
        before = 0
        for due in sorted(self._due_by):
            before += self._due_by[due]
            yield due, max(0, due - self._version + 1) * self._q - len(self._taken) - before

    def _feasible(self) -> bool:
        return all(slack >= 0 for _, slack in self._slack())

    def _may_join(self, group: Pending) -> bool:
        return all(slack > 0 for due, slack in self._slack() if due < group.due)
