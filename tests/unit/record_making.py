"""Helpers for tests of the record: calls made from plain lists, against a plain list of what the engine saw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import numpy as np

from opengyre.record.call import Attach, CommittedCall, digest_ids
from opengyre.record.tree import Tree
from opengyre.record.types import CallMeta, Finish, Span


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@cache
def meaning(message: object) -> bytes:
    return repr(message).encode()


def chain(messages: Sequence[object], tools: object = "") -> list[bytes]:
    """Chained keys of messages given as any values whose repr is their meaning."""
    key, out = repr(tools).encode(), []
    for message in messages:
        key = blake2b(key + meaning(message), digest_size=16).digest()
        out.append(key)
    return out


def meta(call_id: str, **kw: object) -> CallMeta:
    base = {"dialect": "chat", "started_s": 0.0, "ended_s": 1.0, "finish": Finish.STOP, "delivered": True}
    return CallMeta(call_id=call_id, **{**base, **kw})  # type: ignore[arg-type]


def reply(values: Sequence[int], version: int = 0, cell: str = "cell-0", trainable: bool = True) -> Span:
    logprobs = np.array([-0.01 * (v % 50 + 1) for v in values], np.float32)
    return Span(np.array(values, np.int32), logprobs, version, cell, trainable)


class Talk:
    """A harness, a proxy and an engine in miniature: messages are lists of token ids, and mean what they are.

    Every message is followed by token 1, every prompt ends with token 2 (the generation prompt). ``seen`` keeps what
    the engine saw and sampled per call, apart from the tree.
    """

    END, GO = 1, 2

    def __init__(self, tree: Tree | None = None) -> None:
        self.tree = tree or Tree()
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []
        self.made: list[CommittedCall] = []

    def prepare(
        self, messages: Sequence[Sequence[int]], answer: Sequence[int], *, tools: object = "", usable: bool = True,
        versions: Sequence[int] = (0,), attach: Attach | None = None, **about: object,
    ) -> CommittedCall:  # fmt: skip
        messages = [tuple(m) for m in messages]
        keys = chain(messages, tools)
        at = attach or self.tree.match(keys)
        tail: list[int] = []
        marks = []
        for key, message in zip(keys[at.n_messages :], messages[at.n_messages :], strict=True):
            tail += [*message, self.END]
            marks.append((key, len(tail)))
        tail.append(self.GO)
        prompt = np.concatenate([self.tree.prompt_ids(at), ids(*tail)])
        sampled = ids(*answer, self.END) if answer else ids()
        cuts = np.array_split(sampled, len(versions))
        spans = tuple(reply(c.tolist(), v) for c, v in zip(cuts, versions, strict=True) if len(c))
        name = f"call-{len(self.seen):04d}"
        self.seen.append((prompt, sampled))
        call = CommittedCall(
            at, ids(*tail), tuple(marks), spans,
            chain([*messages, tuple(answer)], tools)[-1] if answer else None,
            meta(name, fork_reason=at.fork_reason, **about),
            digest_ids(prompt), digest_ids(sampled), usable,
        )  # fmt: skip
        self.made.append(call)
        return call

    def say(self, messages: Sequence[Sequence[int]], answer: Sequence[int], **kw: object) -> tuple[int, int]:
        return self.tree.commit(self.prepare(messages, answer, **kw))  # type: ignore[arg-type]
