"""The policy's tokenizer and chat template: ChatML with Hermes tool calls, byte-level BPE.

Trained on conversations that Claude Code really had: its constant tools and prompts become few tokens, a chore's
command a handful. Digits and the words that are copied (files, keys, labels, verdicts) stand alone, so that each is the
same token wherever it is copied to; everything else may merge across punctuation. Tools stand before the system text:
what differs between executions (folder, date) comes after what is the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from chores import FILES, KEYS, LABELS

from opengyre.quickstart.tokenizer import ENDING, MARKERS, SPECIAL, STOP, train

CUTS = (STOP, "<|im_start|>", *MARKERS)  # no piece of text that a merge may see holds one
FIRST = len(SPECIAL)  # token that is not special
BYTES = 256 + len(SPECIAL) + len(MARKERS)  # the smallest vocabulary: no merges
_ALONE = rf"\A[a-z]+\n|\b(?:{'|'.join((*FILES, *KEYS, *LABELS, 'OK', 'FAILED'))})\b|[0-9]"

TEMPLATE = (
    """\
{#- ChatML, Hermes tool calls. A message renders the same wherever it stands. -#}
{%- macro listed() -%}
    {%- if tools -%}
        {{- '<tools>\\n' -}}
        {%- for tool in tools -%}{{- SHOWN + '\\n' -}}{%- endfor -%}
        {{- '</tools>\\n' -}}
    {%- endif -%}
{%- endmacro -%}
{%- if tools and messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\n' + listed() + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'system' and loop.first -%}{{- listed() -}}{%- endif -%}
    {{- message.content or '' -}}
"""
    + ENDING
)


SCHEMA = "(tool.function | tojson)"
SIGNATURE = "tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')'"


def write(out: Path, texts: Iterable[str], vocabulary: int, context: int, *, signatures: bool = False) -> None:
    """Train on ``texts`` (no markers in them); write tokenizer, chat template, and a config that holds the context.

    ``signatures``: the template shows a tool's name and parameters instead of its whole schema.
    """
    shown = TEMPLATE.replace("SHOWN", SIGNATURE if signatures else SCHEMA)
    train(texts, out, vocabulary=vocabulary, context=context, alone=_ALONE, template=shown, longest=64)
    (out / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
