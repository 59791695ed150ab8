"""Agent loops of every family through the whole proxy: one line in the tree, sampled ids untouched, any dialect."""

from __future__ import annotations

from itertools import pairwise

import pytest

from door import Door, opened
from families import FAMILIES, renderer
from opengyre.proxy.conversation import Message, Text, Thinking, ToolCall
from opengyre.proxy.render import Renderer

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
MESSAGES_TOOLS = [{"name": "edit", "description": "Change a file.", "input_schema": SCHEMA}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "edit", "description": "Change.", "parameters": SCHEMA}}]


def reply(
    r: Renderer, after: str, *parts: Text | Thinking | ToolCall, stop: str, thinking: bool | None = None
) -> list[int]:
    """What a model of the family samples to say ``parts``, ended by ``stop``."""
    calls = [(p.name, p.arguments) for p in parts if isinstance(p, ToolCall)]
    written = r.format.write(Message("assistant", parts))
    if written is not None:
        text = written.removeprefix("<|start|>assistant").removesuffix("<|call|>").removesuffix("<|end|>")
    else:
        thought = "".join(p.text for p in parts if isinstance(p, Thinking))
        words = "".join(p.text for p in parts if isinstance(p, Text))
        begin, end = r.format.think
        opened = r.opens_thinking(thinking, after)
        text = f"{'' if opened else begin}\n{thought}\n{end}\n\n" if thought or opened else ""
        text += words + (r.format.write_calls(calls) if calls else "")
    return [*r.encode(text), r._tokenizer.token_to_id(stop)]


ENDS = {  # what a model of the family ends a call with, and what it ends its last turn with
    "glm": ("<|observation|>", "<|user|>"),
    "harmony": ("<|call|>", "<|return|>"),
    "deepseek": ("<｜end▁of▁sentence｜>",) * 2,
    "deepseek_v3": ("<｜end▁of▁sentence｜>",) * 2,
    "mistral": ("</s>", "</s>"),
    "llama3": ("<|eot_id|>", "<|eot_id|>"),
    "plain": ("<end_of_turn>", "<end_of_turn>"),
    "ending": ("<|end|>", "<|end|>"),
}


def script(r: Renderer, family: str) -> list[list[int]]:
    """Three turns: thinking and a call, another call, words."""
    called, ended = ENDS.get(family, ("<|im_end|>", "<|im_end|>"))
    first, second = ToolCall("", "edit", {"path": "a.py", "line": 3}), ToolCall("", "edit", {"path": "b.py"})
    return [
        reply(r, "user", Thinking("I look first."), first, stop=called),
        reply(r, "tool", second, stop=called),
        reply(r, "tool", Text("It is done."), stop=ended),
    ]


async def loop(door: Door) -> None:
    """An agent on Messages that answers calls until there are none."""
    messages: list[dict] = [{"role": "user", "content": "fix it"}]
    body = {"model": "m", "max_tokens": 500, "system": "You are an agent.", "tools": MESSAGES_TOOLS}
    for n in range(3):
        status, answer = await door.post("/v1/messages", {**body, "messages": messages})
        assert status == 200, answer
        messages.append({"role": "assistant", "content": answer["content"]})
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert (answer["stop_reason"], len(calls)) == (("tool_use", 1) if n < 2 else ("end_turn", 0)), answer
        results = [{"type": "tool_result", "tool_use_id": c["id"], "content": f"ok {n}"} for c in calls]
        messages.append({"role": "user", "content": results or "thanks"})
    door.script.replies = [door.renderer.encode("") + door.renderer.stop_token_ids[:1]]
    status, _ = await door.post("/v1/messages", {**body, "messages": messages})
    assert status == 200


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_agent_loop_is_one_line_with_sampled_ids_untouched(tmp_path, family):
    r = renderer(family)
    async with opened(tmp_path, render=r) as door:
        engine = door.engine()
        said = script(r, family)
        door.script.replies = list(said)
        await loop(door)
        prompts = [list(request.prompt_ids) for request in engine.requests]
        for n in range(3):  # each prompt goes on exactly where the reply before ended
            line = prompts[n] + said[n]
            assert prompts[n + 1][: len(line)] == line
        tree = door.session.tree
        assert len(tree.leaves()) == 1 and not any(call.meta.fork_reason for call in tree.calls()[1:])
        path = door.store.load_tree("e").rebuild(tree.calls()[-1].reply_node)
        assert path.ids[: len(prompts[3])].tolist() == prompts[3]
        assert door.session.counters.malformed_calls == 0


async def test_glm_and_harmony_turns_come_out_of_chat_as_well(tmp_path):
    for family in ("glm", "harmony"):
        r = renderer(family)
        (tmp_path / family).mkdir()
        async with opened(tmp_path / family, render=r) as door:
            door.engine()
            door.script.replies = script(r, family)[:1]
            body = {"model": "m", "messages": [{"role": "user", "content": "fix it"}], "tools": CHAT_TOOLS}
            status, answer = await door.post("/v1/chat/completions", body)
            message = answer["choices"][0]["message"]
            assert status == 200 and answer["choices"][0]["finish_reason"] == "tool_calls"
            assert message["reasoning_content"] == "I look first."
            assert message["tool_calls"][0]["function"]["name"] == "edit"


@pytest.mark.parametrize("family", ["glm", "harmony", "qwen3_coder", "deepseek"])
async def test_streamed_tokens_are_the_recorded_turn(tmp_path, family):
    r = renderer(family)
    async with opened(tmp_path, render=r, stream_tokens=True) as door:
        door.engine()
        end = ENDS.get(family, ("", "<|im_end|>"))[1]
        door.script.replies = [reply(r, "user", Thinking("I look first."), Text("It is done."), stop=end)]
        body = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "fix it"}]}
        deltas = [e["delta"] for e in await door.stream("/v1/messages", body) if e["type"] == "content_block_delta"]
        assert "".join(d.get("thinking", "") for d in deltas) == "I look first."
        assert "".join(d.get("text", "") for d in deltas) == "It is done."


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_coder", "glm", "deepseek", "harmony"])
async def test_append_only_chats_never_fork_thinking_or_not(tmp_path, family, thinking):  # T05
    r = renderer(family)
    async with opened(tmp_path, render=r) as door:
        engine = door.engine()
        end = ENDS.get(family, ("", "<|im_end|>"))[1]
        parts = [Text("It is done.")] if thinking == "disabled" else [Thinking("hm"), Text("It is done.")]
        said = reply(r, "user", *parts, stop=end, thinking=thinking == "enabled")
        messages: list[dict] = [{"role": "user", "content": "fix it"}]
        for n in range(5):
            door.script.replies = [said]
            body = {"model": "m", "max_tokens": 500, "messages": messages, "thinking": {"type": thinking}}
            status, answer = await door.post("/v1/messages", body)
            assert status == 200 and answer["content"][-1] == {"type": "text", "text": "It is done."}, answer
            messages.append({"role": "assistant", "content": answer["content"]})
            messages += [{"role": "user", "content": "go on"}] * (2 if n == 1 else 1)
        prompts = [list(request.prompt_ids) for request in engine.requests]
        assert all(b[: len(a) + len(said)] == a + said for a, b in pairwise(prompts))
        assert len(door.session.tree.leaves()) == 1
