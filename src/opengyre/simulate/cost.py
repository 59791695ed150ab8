"""Where the time of a cell goes: the one cost model of simulated runs, small enough to pace an engine with.

All figures are of one cell. Calls on a cell share it: a decode step serves every call of the batch once, and prefill
stops decoding while it lasts. What is not modelled: speculative decoding, KV eviction, networks that saturate.
"""

from __future__ import annotations

import msgspec

from opengyre.errors import ConfigError


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds, and tokens per second. The defaults are those of a 48-node cell; workload files say what they assume."""

    decode_base_s: float = 0.03  # a decode step of an empty batch: the weights are read
    decode_call_s: float = 0.0  # more for every call in the batch
    decode_context_s: float = 0.0  # more for every 1,000 tokens of context in the batch
    prefill_tokens_per_s: float = 400_000.0
    train_tokens_per_s: float = 100_000.0  # forward and backward, after prefix sharing
    micro_step_s: float = 0.0  # fixed part of a micro-step
    hand_over_s: float = 1.0  # a satellite's gradient sum into the core's
    commit_s: float = 20.0  # optimizer step and checkpoint
    publish_s: float = 5.0  # weights to where cells can pull them
    pull_s: float = 3.0  # a serving cell takes new weights; nothing is decoded meanwhile
    to_train_s: float = 8.52  # rollout to training, published for 48-node cells (SPEC section 2)
    to_rollout_s: float = 3.46  # training to rollout, likewise
    kv_tokens_per_s: float = 5e6  # KV of a stopped call to another cell
    restart_s: float = 300.0  # a cell that died, until it has a role again

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "train_tokens_per_s", "kv_tokens_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{getattr(self, name)}", where=f"cost.{name}", right="above 0")
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ConfigError(f"{getattr(self, name)}", where=f"cost.{name}", right="at least 0")
        if self.decode_base_s + self.decode_call_s <= 0:
            raise ConfigError("0", where="cost.decode_base_s, cost.decode_call_s", right="one of them above 0")

    def decode_step_s(self, calls: float, context_tokens: float = 0.0) -> float:
        """One decode step of a batch: seconds until each of its calls has one more token."""
        return self.decode_base_s + self.decode_call_s * calls + self.decode_context_s * context_tokens / 1000

    def prefill_s(self, tokens: float) -> float:
        """Prefill of so many tokens."""
        return tokens / self.prefill_tokens_per_s

    def train_s(self, tokens: float) -> float:
        """One micro-step of so many tokens."""
        return self.micro_step_s + tokens / self.train_tokens_per_s

    def kv_move_s(self, tokens: float) -> float:
        """The KV of so many tokens to another cell."""
        return tokens / self.kv_tokens_per_s

    @property
    def switch_pair_s(self) -> float:
        """To the other role and back."""
        return self.to_train_s + self.to_rollout_s
