"""Many executions at once, for long enough to see whether anything is kept: errors, loop lag, memory.

``--sessions`` executions of ``--turns`` calls each, ``--at-once`` of them at a time; the engine, inside the proxy's
process, answers at once, so that only the proxy works. An execution that ends is forgotten and the next begins. Printed
as executions finish: how late the proxy's event loop was, and the memory of its process. Full size:
``--sessions 1000 --at-once 1000``, all at once, then ``--sessions 1000 --at-once 100`` for memory after the first 100.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from multiprocessing.connection import Connection

import aiohttp
from proxy_stage import Talk, Words, client, our_stage, percentile

EVERY = 10  # reports


class Soak:
    """The run: executions opened, played and ended, over one pipe to the proxy."""

    def __init__(self, pipe: Connection, told: argparse.Namespace) -> None:
        self.pipe, self.told, self.words = pipe, told, Words()
        self.errors, self.calls, self.finished = list[str](), 0, 0
        self.lag, self.busy, self.walks = list[float](), list[float](), list[float]()
        self.memory = list[int]()
        self.tracked = 0
        self.began = time.perf_counter()

    def ask(self, *question: object):
        """One question to the proxy; the pipe is quick, the client can wait for it."""
        self.pipe.send(question)
        return self.pipe.recv()

    async def execution(self, http: aiohttp.ClientSession, name: str) -> None:
        url, key = self.ask("open", [name])[name]
        talk = Talk(self.words, self.told.tokens, url + "/v1", key)
        try:
            for _ in range(self.told.turns):
                await talk.call(http)
                self.calls += 1
        except (RuntimeError, aiohttp.ClientError) as error:
            self.errors.append(f"{name}: {error}")
        if not self.finished:
            self.tracked = self.ask("tracked")
        self.memory.append(self.ask("end", [name]))
        self.finished += 1
        if self.finished % max(1, self.told.sessions // EVERY) == 0:
            self.report()

    def report(self) -> None:
        spent, self.tracked = self.ask("spent"), max(self.tracked, self.ask("tracked"))
        fresh = spent.lag
        self.lag += fresh
        self.busy += spent.busy
        self.walks += spent.walks
        print(
            f"{self.finished:6} executions  {self.calls / (time.perf_counter() - self.began):7.0f} calls/s  "
            f"loop lag p50 {1000 * percentile(fresh, 50):6.1f}  p99 {1000 * percentile(fresh, 99):6.1f}  "
            f"max {1000 * max(fresh, default=0):6.1f} ms  RSS {self.memory[-1] / 2**20:6.0f} MiB",
            flush=True,
        )

    async def run(self) -> None:
        waiting = asyncio.Semaphore(self.told.at_once)

        async def one(http: aiohttp.ClientSession, name: str) -> None:
            async with waiting:
                await self.execution(http, name)

        async with client() as http:
            await asyncio.gather(*(one(http, f"e{i}") for i in range(self.told.sessions)))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--sessions", type=int, default=200)
    options.add_argument("--at-once", type=int, default=50)
    options.add_argument("--turns", type=int, default=20)
    options.add_argument("--tokens", type=int, default=500, help="of the first request; each turn adds about 500")
    told = options.parse_args()
    with our_stage([]) as (_, pipe, _):
        soak = Soak(pipe, told)
        asyncio.run(soak.run())
    early = soak.memory[min(100, len(soak.memory) - 1)]
    print(f"calls                {soak.calls:,}, {len(soak.errors)} failed {soak.errors[:3] or ''}")
    print(
        f"loop lag             p50 {1000 * percentile(soak.lag, 50):.1f} ms, p99 {1000 * percentile(soak.lag, 99):.1f} "
        f"ms, max {1000 * max(soak.lag):.1f} ms"
    )
    print(
        f"loop's CPU time      till a timer of 10 ms is heard: p50 {1000 * percentile(soak.busy, 50):.1f} ms, "
        f"p99 {1000 * percentile(soak.busy, 99):.1f} ms, max {1000 * max(soak.busy):.1f} ms"
    )
    walks = f"{len(soak.walks)} full ones, the longest {1000 * max(soak.walks, default=0):.1f} ms"
    print(f"cycle collector      {walks}; {soak.tracked:,} objects known to it at most, those of the program left out")
    print(f"memory at the end    {soak.memory[-1] / early:.2f} x that after the first {min(100, len(soak.memory))}")


if __name__ == "__main__":
    main()
