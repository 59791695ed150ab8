"""Scheduling policies by name: ``elastic``, ``colocate``, ``async``, ``lend``, or a user's ``module:class``."""

from __future__ import annotations

from opengyre import named
from opengyre.cells.policies.async_ import AsyncPolicy
from opengyre.cells.policies.base import Policy, PolicyMaker
from opengyre.cells.policies.colocate import ColocatePolicy
from opengyre.cells.policies.elastic import ElasticPolicy
from opengyre.cells.policies.elastic_plus import ElasticPlusPolicy
from opengyre.cells.policies.lend import LendPolicy
from opengyre.config import RunConfig
from opengyre.errors import ConfigError, boundary

_MAKERS = (ElasticPolicy, ElasticPlusPolicy, ColocatePolicy, AsyncPolicy, LendPolicy)
POLICIES: dict[str, PolicyMaker] = {p.name: p for p in _MAKERS}


def make_policy(config: RunConfig, name: str | None = None) -> Policy:
    """The policy that ``schedule.policy`` names, or ``name``. A user's class is called with the run's config.

    Raises:
        ConfigError: no such policy, it cannot be made, or it lacks ``decide``, ``name`` or ``moves_core``.
    """
    name = name or config.schedule.policy
    maker = POLICIES.get(name) or _load(name)
    with boundary(ConfigError, "schedule.policy"):
        policy = maker(config)
    if missing := [part for part in ("decide", "name", "moves_core") if not hasattr(policy, part)]:
        raise ConfigError(f"{name!r} lacks {', '.join(missing)}", where="schedule.policy", right="see policies/base.py")
    return policy


def _load(name: str) -> PolicyMaker:
    if ":" not in name:
        known = ", ".join(POLICIES)
        raise ConfigError(f"{name!r}", where="schedule.policy", right=f"one of {known}, or module:class")
    maker: PolicyMaker = named.load(name, "schedule.policy")
    return maker
