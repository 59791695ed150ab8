"""40 s of silence in the middle of a turn: every harness waits, whatever clocks of its own it has, and asks once."""

from __future__ import annotations

import asyncio

from client_parts import KEEPALIVE_S, Kit, wanted
from clients import needs, staged
from engines import ScriptedEngine
from player import Ask, Say, calls

HARNESSES = (
    Kit("opencode", lambda command: ("bash", {"command": command, "description": "run"})),
    Kit("codex", lambda command: ("exec_command", {"cmd": command})),
    Kit("qwen_code", lambda command: ("run_shell_command", {"command": command, "is_background": False})),
    Kit(
        "mini_swe_agent",
        lambda command: ("bash", {"command": command}),
        end=calls(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
    ),
)
for kit in HARNESSES:
    needs(kit.kind)
SILENCE_S = 40.0  # longer than the 15 s to 30 s after which clients and what stands before them lose patience


async def test_a_long_silence_ends_no_run(tmp_path):
    """All at once: what is tested are the clients' own clocks, and they run side by side."""

    async def silence(_: ScriptedEngine) -> None:
        await asyncio.sleep(SILENCE_S)

    async def play(kit: Kit) -> None:
        def part(ask: Ask) -> Say:
            return Say(kit.end) if "STEP0:" in ask else Say(kit.step(0), [(6, silence)])

        place = tmp_path / kit.kind
        place.mkdir()
        async with staged(place, kit.kind, part, keepalive_s=KEEPALIVE_S) as stage:
            played = await stage.run("Do the step.", wanted=wanted(1))
        assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.log[-3000:]
        assert played.leaves == {"main": 1} and len(played.tree.calls()) == 2, played.draw()
        assert played.session.counters.joined == played.session.counters.undelivered == 0

    await asyncio.gather(*map(play, HARNESSES))
