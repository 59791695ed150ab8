"""The proxy as executions see it: sessions opened with the pins of their split."""

from __future__ import annotations

import msgspec

from opengyre.config import RunConfig
from opengyre.proxy.session import Sessions
from opengyre.record.tree import Tree
from opengyre.run.evaluation import PREFIX


class SessionDoor:
    """Implements executions.runner.Door over the proxy's sessions."""

    def __init__(self, sessions: Sessions, config: RunConfig) -> None:
        self._sessions = sessions
        self._pins = config.sampling
        self._held_out_pins = msgspec.structs.replace(config.sampling, temperature=config.eval.temperature)

    def open(self, execution_id: str) -> tuple[str, str]:
        """Open the execution's session: base URL and key."""
        held_out = execution_id.startswith(PREFIX)
        pins = self._held_out_pins if held_out else self._pins
        return self._sessions.open(execution_id, pins=pins, meta={"split": "held_out" if held_out else "train"})

    def close(self, execution_id: str) -> None:
        """End the session; one that was never opened is fine."""
        if execution_id in self._sessions:
            self._sessions.close(execution_id)

    async def settled(self, execution_id: str) -> None:
        """Wait until no call of a closed session runs; one that was never opened is fine."""
        if execution_id in self._sessions:
            await self._sessions.get(execution_id).settled()

    def held_s(self, execution_id: str) -> float:
        """Seconds in which a call of the execution waited for us."""
        return self._sessions.held_s(execution_id) if execution_id in self._sessions else 0.0

    def calls(self, execution_id: str) -> int:
        """Model calls that were let in."""
        return self._sessions.get(execution_id).started if execution_id in self._sessions else 0

    def tree(self, execution_id: str) -> Tree | None:
        """The tree in memory, or None once it is forgotten."""
        return self._sessions.get(execution_id).tree if execution_id in self._sessions else None

    def forget(self, execution_id: str) -> None:
        """Free what the session holds."""
        self._sessions.forget(execution_id)
