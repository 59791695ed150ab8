"""One exported sample: a chosen trajectory with everything that is known of it. Schema ``opengyre.samples/1``.

Thesis: a row stands on its own. Its ``spans`` cover its tokens without a gap and say of each run where it came from,
so nothing but the file is needed to tell what the policy wrote, on which weights, and whether it may be trained; and
``loss_mask`` trains every sampled token of an execution in at most one of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from opengyre.record.tree import Tree
from opengyre.samples.types import Sample

SCHEMA = "opengyre.samples/1"


class Field(NamedTuple):
    """One column. ``type`` is in Arrow's words; T is the number of tokens of the row."""

    name: str
    type: str
    shape: str
    meaning: str


FIELDS = (
    Field("schema", "string", "", f"`{SCHEMA}`; another number means another layout"),
    Field("sample_id", "string", "", "execution id, `/`, leaf of its tree"),
    Field("execution_id", "string", "", "one run of one harness on one task"),
    Field("query_id", "string", "", "its group: executions of one task that are compared with each other"),
    Field("task_id", "string", "", "the task"),
    Field("split", "string", "", "`train` or `held_out`"),
    Field("role", "string", "", "whose voice it is: `main`, `main_summary`, `sub_agent`, `sub_agent_summary`"),
    Field("outcome", "string", "", "how the execution ended"),
    Field("reward", "double", "", "of the execution; null if it was not scored, which is not 0"),
    Field("advantage", "double", "", "of the execution in its group; null if it was not scored"),
    Field("weight", "double", "", "1 / N, N the trainable tokens of all exported rows of the execution"),
    Field("input_ids", "list<int32>", "T", "token ids, as the engine saw and sampled them"),
    Field("loss_mask", "list<int8>", "T", "1 where the token is trained in this row, else 0"),
    Field("logprobs", "list<float>", "T", "behaviour log-probability, after temperature; null where not sampled"),
    Field("oldest_version", "int64", "", "oldest weights version among the trained tokens"),
    Field("newest_version", "int64", "", "newest weights version among the trained tokens"),
    Field("spans", "list<span>", "", "runs of tokens of one provenance; they cover 0..T without a gap"),
    Field("messages", "list<message>", "", "for people, with `--messages`: never encode them again to train"),
)
SPAN_FIELDS = (
    Field("start", "int64", "", "first token"),
    Field("stop", "int64", "", "one past the last token"),
    Field("sampled", "bool", "", "true: written by the policy; false: by the harness or the chat template"),
    Field("trainable", "bool", "", "may be trained: complete, finite, and seen by the harness"),
    Field("version", "int64", "", "weights version that sampled it; null if not sampled"),
    Field("cell", "string", "", "cell or server that sampled it; null if not sampled"),
    Field("call_id", "string", "", "model call that added it"),
)
MESSAGE_FIELDS = (
    Field("role", "string", "", "`system`, `user`, `assistant`, `tool`"),
    Field("content", "string", "", "text"),
    Field("reasoning_content", "string", "", "reasoning; null if there is none"),
    Field("tool_calls", "list<call>", "", "`{type, function: {name, arguments}}`, arguments as JSON text, or null"),
)


@dataclass(frozen=True, slots=True)
class ExportSpan:
    """A run of tokens of one provenance: see ``SPAN_FIELDS``."""

    start: int
    stop: int
    sampled: bool
    trainable: bool
    version: int | None
    cell: str | None
    call_id: str

    def row(self) -> dict[str, Any]:
        """As plain data."""
        return {field.name: getattr(self, field.name) for field in SPAN_FIELDS}


@dataclass(frozen=True, slots=True)
class About:
    """What is known of an execution besides its calls. ``reward`` is None if it was not scored."""

    execution_id: str
    query_id: str
    task_id: str
    split: str
    outcome: str
    reward: float | None
    advantage: float | None


@dataclass(frozen=True, slots=True)
class ExportSample:
    """A sample, its execution and its provenance. ``messages`` are None unless asked for."""

    sample: Sample
    about: About
    spans: tuple[ExportSpan, ...]
    messages: list[dict[str, Any]] | None = None

    def row(self) -> dict[str, Any]:
        """The native row: ``FIELDS``; arrays stay arrays, log-probabilities are NaN where there is none."""
        sample, about = self.sample, self.about
        return {
            "schema": SCHEMA,
            "sample_id": sample.sample_id,
            "execution_id": about.execution_id,
            "query_id": about.query_id,
            "task_id": about.task_id,
            "split": about.split,
            "role": sample.role.value,
            "outcome": about.outcome,
            "reward": about.reward,
            "advantage": about.advantage,
            "weight": sample.weight,
            "input_ids": sample.ids,
            "loss_mask": sample.mask.astype(np.int8),
            "logprobs": sample.logprobs,
            "oldest_version": sample.oldest_version,
            "newest_version": sample.newest_version,
            "spans": [span.row() for span in self.spans],
            "messages": self.messages,
        }


def spans_of(tree: Tree, leaf: int) -> tuple[ExportSpan, ...]:
    """Provenance of the path to ``leaf``, run by run."""
    spans, at = [], 0
    for node, _, _, span in tree.path(leaf):
        call_id = tree.call_of(node).meta.call_id
        trainable = span.sampled and span.trainable
        spans.append(ExportSpan(at, at + len(span), span.sampled, trainable, span.version, span.cell, call_id))
        at += len(span)
    return tuple(spans)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON takes it: arrays as lists, NaN as None."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind != "f":
        return value.tolist()
    missing = np.isnan(value)
    listed: Iterable[float] = value.tolist()
    return [None if gone else number for number, gone in zip(listed, missing.tolist(), strict=True)]
