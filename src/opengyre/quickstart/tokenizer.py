"""The shipped policy's tokenizer and chat template: ChatML with Hermes tool calls in a vocabulary of 512.

Byte-level BPE, trained on demonstrations. Digits and called names stand alone, so that a name or a constant is the same
token wherever it is copied to; everything else may merge across punctuation, which makes a tool call a handful of
tokens. A role line is never merged with what follows it, so text re-encoded after a role is the text that was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTEXT = 2048  # tokens, as the shipped model has
VOCABULARY = 512  # 256 bytes, 5 markers, the rest merges
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>")
STOP = "<|im_end|>"
ALONE = r"\A[a-z]+\n|[A-Za-z_]+(?=\()|[0-9]"

ENDING = """\
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
"""  # of a message, with its calls, and of a prompt

TEMPLATE = (
    """\
{#- ChatML, Hermes tool calls. A message renders the same wherever it stands. -#}
{%- macro listed() -%}
    {%- for tool in tools -%}
        {{- '\\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' -}}
    {%- endfor -%}
{%- endmacro -%}
{%- if tools and messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nTools:' + listed() + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
    {%- if message.role == 'system' and loop.first and tools -%}
        {{- '\\nTools:' + listed() -}}
    {%- endif -%}
"""
    + ENDING
)


def train(
    texts: Iterable[str],
    out: Path,
    *,
    vocabulary: int = VOCABULARY,
    context: int = CONTEXT,
    alone: str = ALONE,
    template: str = TEMPLATE,
    longest: int | None = None,
) -> None:
    """Train on ``texts`` (no markers in them) and write tokenizer.json, tokenizer_config.json, chat_template.jinja.

    ``alone``: a pattern of what no merge may touch; ``longest``: characters of a token at most; ``context`` in tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(alone), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=longest,
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
    (out / "chat_template.jinja").write_text(template)
