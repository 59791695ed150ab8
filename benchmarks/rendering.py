"""What rendering costs per model call, against the template applied to the whole history, in one run.

    python benchmarks/rendering.py [--template FILE.jinja ...] [--turns 50 200]

A conversation as coding agents have it: a system prompt, 24 tools (60 kB), turns of reasoning, words and a call,
results of 1,360 characters. Columns, in ms:

- whole: the history through the template and the tokenizer, as engines do it for each call;
- tail: what one call adds (a new result and what asks for a reply); text, encode: the template's and the tokenizer's
  part of it;
- seen: the same tail again; again: the whole prompt with its messages cached (a fork, count_tokens, kept tails).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # templates and tokenizer of the tests

import msgspec
from templates import tokenizer

from families import renderer
from opengyre.proxy.conversation import Conversation, Message, Text, Thinking, Tool, ToolCall, ToolResult
from opengyre.proxy.formats.registry import choose
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.render import Renderer
from opengyre.proxy.template import ChatTemplate

_PROPERTIES = {
    f"key_{k}": {"type": "string", "description": "What it means and how it is used. " * 6} for k in range(8)
}
TOOLS = tuple(
    Tool(f"tool_{n}", "Do something. " * 80, {"type": "object", "properties": _PROPERTIES}) for n in range(24)
)


def history(turns: int) -> tuple[Message, ...]:
    """System, user, and so many turns with a result each; a result is last."""
    messages = [Message("system", (Text("You are an agent. " * 400),)), Message("user", (Text("Fix the bug."),))]
    for n in range(turns):
        call = ToolCall(f"call{n:05}", "tool_1", {"key_1": f"grep -n name_{n} src", "key_2": "x" * 60})
        messages.append(Message("assistant", (Thinking("I should look first. " * 8), Text("I look."), call)))
        messages.append(Message("tool", (ToolResult(call.call_id, f"{n}: def name(argument): return 1\n" * 40),)))
    return tuple(messages)


def ms(work: Callable[[], object], times: int = 7) -> float:
    """Median milliseconds of this thread on a core: other load does not count."""
    taken = []
    for _ in range(times):
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return statistics.median(taken) * 1e3


def whole_text(r: Renderer, c: Conversation) -> Callable[[], str]:
    """The template on the whole conversation; without words or reasoning beside calls where it refuses them."""
    names = {p.call_id: (p.name, p.call_id) for m in c.messages for p in m.parts if isinstance(p, ToolCall)}
    wording = r._wording
    tools = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in c.tools]
    for drop in ((), (Text,), (Text, Thinking)):
        said = [tuple(p for p in m.parts if m.role != "assistant" or not isinstance(p, drop)) for m in c.messages]
        kept = [Message(m.role, parts) for m, parts in zip(c.messages, said, strict=True)]
        listed = [wording._plain(m, "user" if i else "", names) for i, m in enumerate(kept)]
        work = partial(wording._template.text, listed, tools=tools, generate=True)
        try:
            work()
        except Refusal:
            continue
        return work
    raise SystemExit("the template takes no conversation with calls")


def measure(name: str, r: Renderer, turns: int) -> None:
    """One line."""
    messages = history(turns)
    n = len(messages) - 1
    c, call_id = Conversation(messages, TOOLS), f"call{turns - 1:05}"
    text = whole_text(r, c)
    last = r.render(Conversation(messages[:n], TOOLS)).ids[-1]
    fresh = count()

    def new_tail() -> None:
        result = Message("tool", (ToolResult(call_id, f"{next(fresh)}{messages[n].text}"),))
        r.render_tail(Conversation((*messages[:n], result), TOOLS), n, last)

    tail = r.decode(r.render_tail(c, n, last).ids)
    whole = ms(lambda: r.encode(text()), 3)
    new, bare = ms(new_tail, 101), ms(lambda: r.encode(tail), 101)
    names = r._names(messages, n, 1)
    said = ms(lambda: r._wording.unit(messages[n:], "assistant", None, names), 101)
    seen, again = ms(lambda: r.render_tail(c, n, last), 101), ms(lambda: r.render(c))
    print(
        f"{name[:34]:34} {turns:5} {whole:9.1f} {new:8.3f} {said:8.3f} {bare:8.3f} {seen:8.3f} {again:9.2f}   "
        f"{whole / new:9.0f}x {whole / again:10.1f}x"
    )


def main() -> None:
    """Print a table of milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--template", type=Path, nargs="*", default=[], help="a model's own template")
    parser.add_argument("--turns", type=int, nargs="*", default=[20, 200])
    args = parser.parse_args()
    made = {name: renderer(name) for name in ("qwen3", "qwen3_coder", "glm", "deepseek", "harmony")}
    for path in args.template:
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
        made[path.stem] = Renderer(tokenizer(source, choose(source).markers), template, context=1 << 22)
    print(f"{'template':34} turns     whole     tail     text   encode     seen     again   whole/tail whole/again")
    for name, r in made.items():
        for turns in args.turns:
            measure(name, r, turns)


if __name__ == "__main__":
    main()
