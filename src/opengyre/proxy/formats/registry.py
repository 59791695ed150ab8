"""The formats there are, and which one a model folder uses."""

from __future__ import annotations

from opengyre.errors import ConfigError
from opengyre.proxy.formats import calls
from opengyre.proxy.formats.base import Format
from opengyre.proxy.formats.harmony import Harmony
from opengyre.proxy.formats.tagged import Tagged

_DSML = calls.invoke("｜DSML｜", "｜DSML｜tool_calls", "｜DSML｜function_calls", marked=True)

# In order of how telling their signs are: the first that speaks a template is taken, the last speaks any.
FORMATS: dict[str, Format] = {
    made.name: made
    for made in (
        Harmony(),
        Tagged("deepseek_dsml", _DSML, (("｜DSML｜",),)),
        Tagged("deepseek_v3", calls.deepseek_fenced, (("<｜tool▁sep｜>", "```json"), ("<｜Assistant｜>", "```json"))),
        Tagged("deepseek", calls.deepseek, (("<｜tool▁sep｜>",), ("<｜Assistant｜>",))),
        Tagged("kimi", calls.kimi, (("<|tool_call_argument_begin|>",),), ids="functions.{name}:{index}"),
        Tagged("minimax", calls.invoke("", "minimax:tool_call"), (("minimax:tool_call", "<invoke name="),)),
        Tagged("mistral", calls.mistral, (("[TOOL_CALLS]",),)),
        Tagged("glm", calls.arg_key, (("<arg_key>", "<tool_call>"),)),
        Tagged("seed", calls.function_tags("<seed:tool_call>", "</seed:tool_call>"), (("<seed:tool_call>",),)),
        Tagged("qwen3_coder", calls.function, (("<function=", "<parameter=", "<tool_call>"),)),
        Tagged("hermes", calls.hermes, (("<tool_call>", '"arguments"'), ("<tool_call>", "'arguments'"))),
        Tagged("llama3", calls.llama, (("<|start_header_id|>", '"parameters": '),)),
        Tagged("generic", calls.any_tool_call, ((),)),
    )
}


def choose(template: str, name: str | None = None) -> Format:
    """The format called ``name``, or else the one that the source of a chat template is written for.

    Raises ConfigError when there is no such format.
    """
    if name is None:
        made = next(made for made in FORMATS.values() if made.speaks(template))
    elif name in FORMATS:
        made = FORMATS[name]
    else:
        raise ConfigError(f"{name!r}", where="model.format", right=", ".join(FORMATS))
    return made.for_template(template)
