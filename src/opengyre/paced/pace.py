"""The clock of a paced run: seconds of the modelled cluster, of which ``speed`` pass in one of ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from opengyre.config import PacedConfig
from opengyre.errors import ConfigError
from opengyre.simulate.cost import CostModel
from opengyre.simulate.workload import load_workload


class Pace:
    """Modelled time. With speed 1 it is ours, which ``clock`` tells."""

    def __init__(self, speed: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.speed, self._clock = speed, clock

    def now(self) -> float:
        """Modelled seconds, monotonic."""
        return self._clock() * self.speed

    async def until(self, moment: float) -> None:
        """Return at a modelled moment; at once if it is past, so that delays of ours do not add up."""
        await asyncio.sleep(max(0.0, (moment - self.now()) / self.speed))

    async def sleep(self, seconds: float) -> None:
        """Let modelled seconds pass."""
        await self.until(self.now() + seconds)


def cost_model(config: PacedConfig) -> CostModel:
    """The cost model that a config names. Raises ConfigError."""
    base = CostModel() if config.workload is None else load_workload(config.workload).cost
    try:
        return msgspec.convert(msgspec.to_builtins(base) | config.cost, CostModel)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(str(error), where="paced.cost", right=", ".join(CostModel.__struct_fields__)) from None


def pace_of(config: PacedConfig) -> Pace:
    """The clock of a run. Raises ConfigError for a speed that time cannot have."""
    if config.speed < 0:
        raise ConfigError(f"{config.speed}", where="paced.speed", right="above 0, or 0 for a real run")
    return Pace(config.speed or 1.0)
