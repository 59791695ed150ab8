"""Chat templates of the families, minimal and our own: each behaves like its family's in what matters to rendering."""

# ruff: noqa: E501  a template's line breaks are text

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from tokenizers import AddedToken

import policies
from opengyre.proxy.formats.registry import FORMATS, choose
from opengyre.proxy.render import Renderer
from opengyre.proxy.template import ChatTemplate

# A turn ends with the next role's token; old reasoning is dropped; results share one observation.
GLM = """[gMASK]<sop>
{%- if tools %}<|system|>
{% for t in tools %}{{ t | tojson(ensure_ascii=False) }}
{% endfor %}Write <tool_call>{name}
<arg_key>{key}</arg_key>
<arg_value>{value}</arg_value>
</tool_call>{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
{%- elif m.role == 'system' %}<|system|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{% if loop.index0 > ns.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>
{%- else %}<think></think>{% endif %}
{%- if m.content %}
{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"""

# Tagged parameters; a system message must come first, a user message must be there, reasoning opens the turn.
QWEN3_CODER = policies.HISTORY_REWRITING.replace(
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
    """<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>""",
)

# System texts are collected in front; the role after a user only; nothing after results; arguments as an object.
DEEPSEEK = """{{ bos_token }}
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- set ns = namespace(asked=false, tool=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.asked = true %}<｜User｜>{{ m.content }}
{%- elif m.role == 'assistant' %}
{%- if ns.asked %}<｜Assistant｜></think>{% endif %}{% set ns.asked = false %}{{ m.content or '' }}
{%- if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls -%}
<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>
{%- elif m.role == 'tool' %}{% set ns.asked = false %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- endif %}{% set ns.tool = m.role == 'tool' %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked and not ns.tool %}<｜Assistant｜>
{{- '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}"""

# As R1 and V3 have it: arguments as text, a call only where there is no content, outputs opened once per conversation.
DEEPSEEK_V3 = """{{ bos_token }}
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- set ns = namespace(tool=false, first=true) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.tool = false %}<｜User｜>{{ m.content }}
{%- elif m.role == 'assistant' and m.content is none %}{% set ns.tool = false %}<｜Assistant｜><｜tool▁calls▁begin｜>
{%- for c in m.tool_calls %}{{ '' if loop.first else '\\n' }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}
```json
{{ '' + c.function.arguments }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif m.role == 'assistant' %}{{ '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}{% set ns.tool = false %}
{{- m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>
{%- elif m.role == 'tool' %}{% set ns.tool = true %}{{ '<｜tool▁outputs▁begin｜>' if ns.first else '' }}{% set ns.first = false -%}
<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}
{%- endfor %}
{%- if ns.tool %}<｜tool▁outputs▁end｜>{% endif %}
{%- if add_generation_prompt and not ns.tool %}<｜Assistant｜><think>
{% endif %}"""

# Channels; one call a turn; reasoning only in calls; the last turn ends otherwise than the ones before.
HARMONY = """<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools or messages[0].role == 'system' %}<|start|>developer<|message|>
{{- messages[0].content if messages[0].role == 'system' else '' }}
{% for t in tools or [] %}type {{ t.function.name }} = (_: any) => any;
{% endfor %}<|end|>{% endif %}
{%- set ns = namespace(name=none) %}
{%- for m in rest %}
{%- if m.role == 'assistant' %}
{%- if m.content and '<|channel|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}
{%- if m.tool_calls %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- set ns.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ ns.name }}<|channel|>commentary json
{{- '<|message|>' }}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif loop.last and not add_generation_prompt %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- elif m.role == 'tool' %}
{%- if ns.name is none %}{{ raise_exception('no call before the result') }}{% endif -%}
<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# Results name the call by the model's own id.
KIMI = """{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.role }}<|im_middle|>
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for c in m.tool_calls -%}
<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>
{{- c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}
{%- elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{{ m.content }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

# Tags in a section of their own; arguments as an object; a result wants a call before it.
MINIMAX = """{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<minimax:tool_call><invoke name="n"><parameter name="k">v</parameter></invoke></minimax:tool_call><|im_end|>
{% endif %}
{%- set ns = namespace(called=false) %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}
{%- if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% set ns.called = m.tool_calls %}
{%- if m.tool_calls %}
<minimax:tool_call>
{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}
{%- elif m.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('a result without a call') }}{% endif %}<response>{{ m.content }}</response>
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

# The system message stands in the first user turn, roles alternate, tools stand before the user turn.
MISTRAL = """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}{{ bos_token }}
{%- set ns = namespace(user=true) %}
{%- for m in rest if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.user = not ns.user %}
{%- endfor %}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ system + '\\n\\n' if loop.first and system else '' }}{{ m.content }}[/INST]
{%- elif m.role == 'assistant' %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}
{%- endfor %}"""

# One bare call a turn; tools stand in the first user turn.
LLAMA3 = """{{ bos_token }}
{%- set ns = namespace(tools=tools) %}
{%- for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.role == 'user' and ns.tools %}Answer with {"name": name, "parameters": arguments}:
{{ ns.tools | tojson }}
{% set ns.tools = none %}{% endif %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# No system message, no tools, no results, strict alternation.
PLAIN = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
<start_of_turn>{{ m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>assistant
{% endif %}"""

# A conversation that is not asked for a reply ends with a token of its own.
ENDING = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""


class Family(NamedTuple):
    """A template, and the format it is written for."""

    template: str
    format: str


FAMILIES = {
    "chatml": Family(policies.CHATML, "hermes"),
    "qwen3": Family(policies.HISTORY_REWRITING, "hermes"),
    "qwen3_coder": Family(QWEN3_CODER, "qwen3_coder"),
    "glm": Family(GLM, "glm"),
    "deepseek": Family(DEEPSEEK, "deepseek"),
    "deepseek_v3": Family(DEEPSEEK_V3, "deepseek_v3"),
    "harmony": Family(HARMONY, "harmony"),
    "kimi": Family(KIMI, "kimi"),
    "minimax": Family(MINIMAX, "minimax"),
    "mistral": Family(MISTRAL, "mistral"),
    "llama3": Family(LLAMA3, "llama3"),
    "plain": Family(PLAIN, "generic"),
    "ending": Family(ENDING, "generic"),
}

_SPECIAL = re.findall(
    r"\S+",
    """[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|end|> <s> </s> <｜User｜> <｜Assistant｜>
    <｜end▁of▁sentence｜> <start_of_turn> <end_of_turn> <|start_header_id|> <|end_header_id|> <|eot_id|> [INST] [/INST]
    <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|start|> <|message|> <|channel|> <|call|> <|return|>
    <|constrain|> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>""",
)


@cache
def renderer(family: str) -> Renderer:
    """A renderer for a family, over a small tokenizer that has its tokens."""
    template, name = FAMILIES[family]
    tokens = policies.tokenizer()
    tokens.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    markers = [m for m in choose(template).markers if m.startswith(("<", "[")) and not m.endswith('"')]
    tokens.add_tokens([AddedToken(m, special=False, normalized=False) for m in markers])
    eos = {"mistral": "</s>", "ending": "<|endoftext|>"}.get(family, "<|endoftext|>")
    stops = [tokens.token_to_id(eos)]
    made = Renderer(
        tokens, ChatTemplate(template, {"bos_token": "<s>", "eos_token": eos}), context=1 << 20, stop_tokens=stops
    )
    assert made.format.name == name and name in FORMATS
    return made
