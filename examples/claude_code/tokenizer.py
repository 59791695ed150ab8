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
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>")
STOP = "<|im_end|>"
CUTS = (STOP, "<|im_start|>", *MARKERS)  # no piece of text that a merge may see holds one
FIRST = len(SPECIAL)  # token that is not special
BYTES = 256 + len(SPECIAL) + len(MARKERS)  # the smallest vocabulary: no merges
_ALONE = rf"\A[a-z]+\n|\b(?:{'|'.join((*FILES, *KEYS, *LABELS, 'OK', 'FAILED'))})\b|[0-9]"

TEMPLATE = """\
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
    {%- for call in message.tool_calls or [] -%}
        {{- '\\n' if message.content or not loop.first -}}
        {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
        {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


SCHEMA = "(tool.function | tojson)"
SIGNATURE = "tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')'"


def write(out: Path, texts: Iterable[str], vocabulary: int, context: int, *, signatures: bool = False) -> None:
    """Train on ``texts`` (no markers in them); write tokenizer, chat template, and a config that holds the context.

    ``signatures``: the template shows a tool's name and parameters instead of its whole schema.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_ALONE), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=64,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP,
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(TEMPLATE.replace("SHOWN", SIGNATURE if signatures else SCHEMA))
    (out / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
