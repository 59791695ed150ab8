"""Anything that reads a base URL from its environment: a program on the official SDKs, started by ``command``.

Both SDKs in one execution: they are two conversations, recorded side by side.
"""

from __future__ import annotations

import sys

from clients import staged
from opengyre.config import HarnessConfig
from opengyre.executions.harness.command import CommandHarness
from player import Ask, Say, calls

PROGRAM = r"""
import json, os, subprocess, sys
from pathlib import Path
from anthropic import Anthropic
from openai import OpenAI

task = sys.stdin.read()
schema = {"type": "object", "properties": {"command": {"type": "string"}}}

def shell(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout

client, messages = Anthropic(), [{"role": "user", "content": task}]
while True:
    turn = client.messages.create(
        model=os.environ["ANTHROPIC_MODEL"], max_tokens=500, messages=messages,
        tools=[{"name": "bash", "description": "run", "input_schema": schema}],
    )
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": shell(b.input["command"])}
        for b in turn.content if b.type == "tool_use"
    ]
    if not results:
        break
    messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": results}]

client, messages = OpenAI(), [{"role": "user", "content": f"Once more: {task}"}]
while True:
    turn = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=messages,
        tools=[{"type": "function", "function": {"name": "bash", "description": "run", "parameters": schema}}],
    ).choices[0].message
    if not turn.tool_calls:
        break
    messages.append(turn.model_dump(exclude_none=True))
    for call in turn.tool_calls:
        output = shell(json.loads(call.function.arguments)["command"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
Path("said").write_text(turn.content)
"""


async def test_a_program_on_the_official_sdks(tmp_path):
    def part(ask: Ask) -> Say:
        if ask.turns == 0:
            return Say(calls(("bash", {"command": "echo 1 >> a"}), ("bash", {"command": "echo 1 >> b"})))
        return Say(calls(("bash", {"command": "echo 2 >> a"}))) if ask.turns == 1 else Say("All done.")

    config = HarnessConfig(kind="command", command=[sys.executable, "-c", PROGRAM], options={"tools": [sys.prefix]})
    async with staged(tmp_path, "quickstart", part) as stage:
        wanted = {"a": "1\n2\n1\n2", "b": "1\n1", "said": "All done."}
        played = await stage.run("Write.", wanted=wanted, harness=CommandHarness(config))
    assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.log[-3000:]
    assert {c.meta.dialect for c in played.tree.calls()} == {"messages", "chat"}
    assert len(played.tree.calls()) == 6 and played.leaves == {"main": 2}, played.draw()
    assert played.forks == {"new_root": 1}, played.draw()
