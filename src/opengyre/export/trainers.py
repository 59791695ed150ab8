"""Rows in the words of other trainers: verl's agent loop and slime's ``Sample``.

Both cut a trajectory into a prompt and a response with a mask over the response. The cut is made before the first token
that is trained in the row: what comes earlier is context, sampled or not. Both want a number at every response token;
where nothing was sampled it is 0.0, always under mask 0, as they write it themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opengyre.export.sample import SCHEMA, ExportSample, Field
from opengyre.record.types import Logprobs

# verl-project/verl at 02dd715: verl/experimental/agent_loop/agent_loop.py, AgentLoopOutput.as_dict, and the
# non-tensor fields that its postprocessing adds (uid groups a query for group-relative advantages).
VERL_FIELDS = (
    Field("prompts", "list<int32>", "P", "tokens before the first trained one"),
    Field("responses", "list<int32>", "R", "tokens from the first trained one on"),
    Field("response_mask", "list<int8>", "R", "1 where the token is trained in this row"),
    Field("rollout_log_probs", "list<float>", "R", "behaviour log-probability; 0.0 where not sampled (mask 0)"),
    Field("rm_scores", "list<float>", "R", "reward on the last token, 0.0 elsewhere; null without a reward"),
    Field("reward_score", "double", "", "reward"),
    Field("uid", "string", "", "query: executions with one uid are one group"),
    Field("num_turns", "int32", "", "sampled runs in the response"),
    Field("data_source", "string", "", "`opengyre`"),
    Field(
        "extra_info", "extra", "", "`schema, sample_id, execution_id, task_id, split, role, min_version, max_version`"
    ),
)
# THUDM/slime at 0d234f3: slime/utils/types.py, Sample.to_dict; keys it knows and we leave out have its defaults.
SLIME_FIELDS = (
    Field("group_index", "int32", "", "number of the query, in order of appearance"),
    Field("index", "int32", "", "number of the row"),
    Field("prompt", "string", "", "empty: the tokens are the prompt"),
    Field("tokens", "list<int32>", "T", "prompt and response"),
    Field("response", "string", "", "empty: the tokens are the response"),
    Field("response_length", "int32", "", "R: tokens from the first trained one on"),
    Field("label", "string", "", "task id"),
    Field("reward", "double", "", "reward; null without one"),
    Field("loss_mask", "list<int8>", "R", "1 where the token is trained in this row"),
    Field("weight_versions", "list<string>", "", "versions that sampled the response, in order"),
    Field("rollout_log_probs", "list<float>", "R", "behaviour log-probability; 0.0 where not sampled (mask 0)"),
    Field("remove_sample", "bool", "", "true for a row without a reward"),
    Field("status", "string", "", "`completed`, `truncated` (timed out), `failed`"),
    Field("metadata", "object", "", "`{schema, sample_id, execution_id, query_id, split, role, outcome}`"),
    Field("train_metadata", "object", "", "`{advantage, weight}`"),
    Field("session_id", "string", "", "execution id"),
)
_STATUS = {"finished": "completed", "closed": "completed", "timed_out": "truncated"}


def verl_row(item: ExportSample) -> dict[str, Any]:
    """A row of ``VERL_FIELDS``."""
    sample, about = item.sample, item.about
    cut = _cut(item)
    mask = sample.mask[cut:]
    scores = None
    if about.reward is not None:
        scores = np.zeros(len(mask), np.float32)
        scores[-1] = about.reward
    return {
        "prompts": sample.ids[:cut],
        "responses": sample.ids[cut:],
        "response_mask": mask.astype(np.int8),
        "rollout_log_probs": _filled(sample.logprobs[cut:]),
        "rm_scores": scores,
        "reward_score": about.reward,
        "uid": about.query_id,
        "num_turns": sum(span.sampled and span.stop > cut for span in item.spans),
        "data_source": "opengyre",
        "extra_info": {
            "schema": SCHEMA,
            "sample_id": sample.sample_id,
            "execution_id": about.execution_id,
            "task_id": about.task_id,
            "split": about.split,
            "role": sample.role.value,
            "min_version": sample.oldest_version,
            "max_version": sample.newest_version,
        },
    }


class SlimeRows:
    """Rows of ``SLIME_FIELDS``; numbers rows and queries as they come."""

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}
        self._rows = 0

    def __call__(self, item: ExportSample) -> dict[str, Any]:
        """The next row."""
        sample, about = item.sample, item.about
        cut, number = _cut(item), self._rows
        self._rows += 1
        scored = about.reward is not None
        return {
            "group_index": self._groups.setdefault(about.query_id, len(self._groups)),
            "index": number,
            "prompt": "",
            "tokens": sample.ids,
            "response": "",
            "response_length": len(sample.ids) - cut,
            "label": about.task_id,
            "reward": about.reward,
            "loss_mask": sample.mask[cut:].astype(np.int8),
            "weight_versions": [str(s.version) for s in item.spans if s.sampled and s.stop > cut],
            "rollout_log_probs": _filled(sample.logprobs[cut:]),
            "remove_sample": not scored,
            "status": _STATUS.get(about.outcome, "failed"),
            "metadata": {
                "schema": SCHEMA,
                "sample_id": sample.sample_id,
                "execution_id": about.execution_id,
                "query_id": about.query_id,
                "split": about.split,
                "role": sample.role.value,
                "outcome": about.outcome,
            },
            "train_metadata": {"advantage": about.advantage, "weight": sample.weight},
            "session_id": about.execution_id,
        }


def _cut(item: ExportSample) -> int:
    """Tokens before the first trained one; there is one, or the row would not be."""
    return int(item.sample.mask.argmax())


def _filled(logprobs: Logprobs) -> Logprobs:
    return np.nan_to_num(logprobs, nan=0.0)
