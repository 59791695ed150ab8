"""What a policy without weights says: a program's replies, or filler up to the limit that the harness sets."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from opengyre.errors import EngineError
from opengyre.proxy.render import Renderer
from opengyre.rollout.base import GenerateRequest, RolloutEngine

FILLER = " ok"  # harmless in every chat template, and one token in most vocabularies
REMEMBERED = 10_000  # calls that may be continued on another cell; far more than run at once
CALL_ID_CHARS = 32  # of a call's id that stay the same when it moves: the proxy appends the attempt


class Speech:
    """The replies of all cells.

    ``program`` is an engine that answers at once (``rollout.program``); None says filler. A call that is continued
    elsewhere gets the rest of its reply.
    """

    def __init__(self, renderer: Renderer, program: RolloutEngine | None) -> None:
        self._program, self._renderer = program, renderer
        self._filler = renderer.encode(FILLER)
        self._plans: OrderedDict[str, tuple[int, list[int], str]] = OrderedDict()
        self.logprob = -math.log(2.0)  # of every token: what no number depends on

    async def reply(self, request: GenerateRequest) -> tuple[list[int], str]:
        """(ids still to be said, how the reply ends). Raises EngineError if the program does."""
        name = request.call_id[:CALL_ID_CHARS]
        if name not in self._plans:
            ids, ends = await self._plan(request)
            self._plans[name] = (len(request.prompt_ids), ids, ends)
            while len(self._plans) > REMEMBERED:
                self._plans.popitem(last=False)
        start, ids, ends = self._plans[name]
        return ids[len(request.prompt_ids) - start :], ends

    async def _plan(self, request: GenerateRequest) -> tuple[list[int], str]:
        if self._program is None:
            repeats = -(-request.max_new_tokens // len(self._filler))
            return (self._filler * repeats)[: request.max_new_tokens], "length"
        ids: list[int] = []
        async with aclosing(cast(AsyncGenerator, self._program.generate(request))) as chunks:
            async for chunk in chunks:
                ids += chunk.ids
                if chunk.finish is not None:
                    return ids, chunk.finish
        raise EngineError("ended without a finish", where="paced.program")
