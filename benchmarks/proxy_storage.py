"""Bytes on disk per unique token, recorded through the whole proxy, against the record of full prompts.

One execution of ``--turns`` calls that add about 500 tokens each (text, so it shrinks as text does), its words kept for
the viewer too. The naive record, which peers keep, stores the prompt's ids and the reply with each call.
"""

from __future__ import annotations

import argparse
import asyncio
from multiprocessing.connection import Connection

from proxy_stage import REPLY_WORDS, Talk, Words, client, our_stage


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--turns", type=int, default=200)
    told = options.parse_args()
    with our_stage(["e"]) as (_, pipe, opened):
        tokens, stored, naive = asyncio.run(play(pipe, *opened["e"], told.turns))
    print(f"turns                {told.turns}, {tokens / told.turns:.0f} unique tokens each")
    print(f"file                 {stored / 1e6:.3f} MB, {stored / tokens:.2f} bytes per unique token")
    print(f"per 500 new tokens   {500 * stored / tokens * told.turns / 1e6:.3f} MB for {told.turns} turns")
    print(f"full prompts, int32  {naive / stored:.0f} x as much")


async def play(pipe: Connection, url: str, key: str, turns: int) -> tuple[int, int, int]:
    """(unique tokens, bytes stored, bytes of the naive record)."""
    talk, naive = Talk(Words(), 0, url + "/v1", key), 0
    async with client() as http:
        for _ in range(turns):
            await talk.call(http)
            pipe.send(("tokens", "e"))
            tokens = pipe.recv()
            naive += 4 * tokens + 4 * REPLY_WORDS  # ids of the prompt and the reply, and the reply's log-probabilities
    pipe.send(("stored",))
    return tokens, pipe.recv(), naive


if __name__ == "__main__":
    main()
