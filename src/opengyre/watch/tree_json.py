"""One execution's trajectory tree as JSON, for the picture in the report (``run_dir/trees/<execution>.json``).

Schema 1; all offsets and counts are in tokens, times are seconds on the run's clock::

    {"schema": 1, "execution": str, "task": str, "reward": float | null, "outcome": str, "unique_tokens": int,
     "nodes": [{"id": int, "parent": int, "offset": int,   # hangs on the parent's first `offset` tokens; parent 0: root
                "start": int,                              # tokens from the root to its first token
                "call": int,                               # the call that added it, an index into calls
                "spans": [{"kind": "prompt" | "sampled", "n": int, "trained": int,  # tokens chosen into samples
                           "version": int | null, "cell": str | null, "trainable": bool, "text": str}]}],
     "calls": [{"id": str, "started_s": float, "ended_s": float, "finish": str, "delivered": bool, "moves": int,
                "cached": int, "fork": str | null}],
     "leaves": {"<node id>": "main" | "main_summary" | "sub_agent" | "sub_agent_summary"}}

Nodes are in creation order, so a parent comes before its children; the empty root is left out. Readers ignore keys they
do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opengyre.record.call import Node
from opengyre.record.tree import ROOT, Tree
from opengyre.record.types import Role, Span
from opengyre.samples.types import Sample

Masks = Mapping[int, NDArray[np.bool_]]

TEXT_TOKENS = 40  # enough to recognise a message in a tooltip


def tree_to_json(
    tree: Tree,
    roles: Mapping[int, Role],
    trained: Masks,
    *,
    execution: str = "",
    task: str = "",
    outcome: str = "",
    reward: float | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> dict[str, Any]:
    """A tree as plain data.

    Args:
        tree: of a finished execution.
        roles: leaf node -> role.
        trained: node -> bool mask over its tokens, True where the token is trained in some sample (``trained_masks``).
        decode: token ids to text, for the first tokens of each span; without it spans have no text.
    """
    nodes = _nodes(tree)
    return {
        "schema": 1,
        "execution": execution,
        "task": task,
        "reward": reward,
        "outcome": outcome,
        "unique_tokens": tree.unique_tokens,
        "nodes": [_node(node, tree.trainable(node.id), trained.get(node.id), decode) for node in nodes],
        "calls": [
            {
                "id": call.meta.call_id,
                "started_s": round(call.meta.started_s, 3),
                "ended_s": round(call.meta.ended_s, 3),
                "finish": call.meta.finish.value,
                "delivered": call.meta.delivered,
                "moves": call.meta.moves,
                "cached": call.meta.cached_tokens,
                "fork": call.meta.fork_reason,
            }
            for call in tree.calls()
        ],
        "leaves": {str(leaf): role.value for leaf, role in roles.items()},
    }


def trained_masks(samples: Iterable[Sample]) -> dict[int, NDArray[np.bool_]]:
    """What the samples of one execution train, by node: masks over each node's first tokens, those the samples use."""
    out: dict[int, NDArray[np.bool_]] = {}
    for sample in samples:
        start = 0
        for node, length in sample.segments:
            part = np.asarray(sample.mask[start : start + length], dtype=bool)
            start += length
            known = out.get(node)
            if known is not None:
                merged = np.zeros(max(len(known), length), dtype=bool)
                merged[: len(known)] |= known
                merged[:length] |= part
                part = merged
            out[node] = part
    return out


def _nodes(tree: Tree) -> list[Node]:
    """All nodes but the root, in creation order."""
    found, open_ = [], tree.children(ROOT)
    while open_:
        node = open_.pop()
        found.append(node)
        open_ += tree.children(node)
    return [tree.node(node) for node in sorted(found)]


def _node(
    node: Node, trainable: bool, mask: NDArray[np.bool_] | None, decode: Callable[[list[int]], str] | None
) -> dict[str, Any]:
    spans, at = [], 0
    for span in node.spans:
        chosen = 0 if mask is None else int(mask[at : at + len(span)].sum())
        spans.append(_span(span, trainable and span.trainable, chosen, decode))
        at += len(span)
    return {
        "id": node.id,
        "parent": node.parent,
        "offset": node.offset,
        "start": node.start,
        "call": node.call,
        "spans": spans,
    }


def _span(span: Span, trainable: bool, chosen: int, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    return {
        "kind": "sampled" if span.sampled else "prompt",
        "n": len(span),
        "trained": chosen,
        "version": span.version,
        "cell": span.cell,
        "trainable": span.sampled and trainable,
        "text": decode(span.ids[:TEXT_TOKENS].tolist()) if decode else "",
    }
