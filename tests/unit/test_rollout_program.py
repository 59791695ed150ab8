"""A program as a policy: what it sees, what is recorded of it, and what happens when it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from opengyre.errors import EngineError
from opengyre.proxy.conversation import Conversation, Message, Text
from opengyre.rollout.base import GenerateRequest, TokenChunk
from opengyre.rollout.program import Program, ProgramEngine, Said
from policies import renderer

RENDERER = renderer()
HELLO = Conversation((Message("system", (Text("be kind"),)), Message("user", (Text("hello"),))))


async def ask(program: Program, *, session: str = "e", tokens: int = 100, seed: int = 0) -> TokenChunk:
    request = GenerateRequest(
        call_id="c",
        session=session,
        prompt_ids=RENDERER.render(HELLO).ids,
        max_new_tokens=tokens,
        stop_token_ids=RENDERER.stop_token_ids,
    )
    (chunk,) = [chunk async for chunk in ProgramEngine(RENDERER, program, seed=seed).generate(request)]
    return chunk


async def test_a_program_sees_the_turns_and_its_probability_is_recorded_once() -> None:
    seen: list[str] = []

    def program(turns: Sequence[str], random: Random) -> Said:
        seen.extend(turns)
        return Said("good day", -1.5)

    chunk = await ask(program)
    assert seen == ["system\nbe kind", "\nuser\nhello", "\nassistant\n"]
    assert chunk.ids == [*RENDERER.encode("good day"), *RENDERER.stop_token_ids]
    assert chunk.logprobs == [-1.5, *[0.0] * (len(chunk.ids) - 1)]
    assert chunk.finish == "stop"


async def test_a_long_reply_is_cut_where_the_call_may_not_go_on() -> None:
    chunk = await ask(lambda turns, random: Said("good day to you"), tokens=3)
    assert len(chunk.ids) == len(chunk.logprobs) == 3
    assert chunk.finish == "length"


async def test_chance_hangs_on_seed_and_session_alone() -> None:
    def program(turns: Sequence[str], random: Random) -> Said:
        return Said(str(random.random()))

    first = await ask(program)
    assert await ask(program) == first
    assert await ask(program, session="f") != first
    assert await ask(program, seed=1) != first


async def test_a_program_that_breaks_is_an_engine_that_breaks() -> None:
    with pytest.raises(EngineError, match="engine program: ZeroDivisionError"):
        await ask(lambda turns, random: Said(str(1 / 0)))
