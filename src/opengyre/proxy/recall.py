"""The history of a session that goes on after a restart, made again from its record.

The ids we mint are made of their call's id and their number in the turn, so a turn that was stored for people is the
turn again, and harnesses may rewrite it as before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from opengyre.proxy import keys
from opengyre.proxy.conversation import Message, Part, Text, Thinking, ToolCall
from opengyre.proxy.history import History
from opengyre.proxy.reply import mint_for, signature
from opengyre.record.call import STEM
from opengyre.record.tree import Tree


def recall(tree: Tree, messages: Callable[[str], list[dict[str, Any]] | None]) -> History:
    """Remember each reply of a recorded tree after the message it answered.

    Args:
        messages: call id to the messages stored with it, the reply last (``calls.plain``).
    """
    history, places = History(tree), tree.places()
    ends: dict[int, list[bytes]] = defaultdict(list)
    for key, (node, _) in places.items():
        ends[node].append(key)
    for call in tree.calls():
        stored = messages(call.meta.call_id)
        if call.reply_node is None or not stored:
            continue
        turn = _turn(call.meta.call_id, stored[-1]["parts"])
        for key in reversed(ends[call.attach.node] + ends[call.prompt_node]):  # what was answered is mostly the last
            said = tree.own(keys.extend(key, turn), [call.meta.call_id[:STEM]])
            if places.get(said, (None,))[0] == call.reply_node:
                history.remember(key, turn, delivered=call.meta.delivered)
                break
    return history


def _turn(call_id: str, parts: list[dict[str, Any]]) -> Message:
    mint = mint_for(call_id)

    def part(stored: dict[str, Any]) -> Part:
        if "call" in stored:
            return ToolCall(mint(), stored["call"], stored["arguments"])
        return Thinking(stored["thinking"], signature(call_id)) if "thinking" in stored else Text(stored["text"])

    return Message("assistant", tuple(map(part, parts)))
