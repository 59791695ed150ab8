"""Tokenizers and chat templates for tests: small, real, made here."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from opengyre.proxy.render import Renderer
from opengyre.proxy.template import ChatTemplate

# Renders each message by itself; system anywhere; tools in front.
CHATML = """
{%- if tools %}<|im_start|>system
# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}
{%- if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endgeneration %}
{%- elif m.role == 'tool' %}<|im_start|>tool
{{ m.content }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

# Behaves like the harder ones in the field: reasoning of turns before the last query is dropped, an empty reasoning
# block appears in the newest turn, consecutive tool results share one user turn, a system message must be first, and at
# least one user message is required.
HISTORY_REWRITING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- elif m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>
{{ (m.reasoning_content or '').strip('\n') }}
</think>

{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}
{%- if not loop.first or m.content %}
{% endif %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
_CORPUS = ["international user assistant system the tool name arguments tokens of a turn and the next\n" * 4]


def tokenizer(corpus: Sequence[str] = _CORPUS, vocabulary: int = 400) -> Tokenizer:
    """Byte-level BPE with a few merges: any text, and fewer tokens than bytes. More of both, and it is a real one."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(corpus, trainer)
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in _MARKERS])
    return made


def renderer(template: str = CHATML, *, context: int = 100_000, format: str | None = None) -> Renderer:
    """A renderer over the test tokenizer."""
    return Renderer(tokenizer(), ChatTemplate(template, {"eos_token": "<|im_end|>"}), context=context, format=format)
