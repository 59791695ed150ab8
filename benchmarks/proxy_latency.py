"""What the proxy adds to a call, by length of its history.

One session at a time, calls in turn: through the proxy, and the engine called directly with as many tokens as ids. The
difference is what the proxy adds; it has to receive the history, which grows. What must not grow - finding, reading,
matching and rendering a request, and recording the call - is timed inside the proxy. Full size: ``--calls 200``.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from multiprocessing.connection import Connection

import aiohttp
import msgspec
import numpy as np
from proxy_stage import Spent, Talk, Words, client, our_stage, percentile, process, stub_engine


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--calls", type=int, default=40)
    options.add_argument("--tokens", type=int, nargs="+", default=[1_000, 16_000, 64_000, 256_000])
    told = options.parse_args()
    rows = {}
    print("tokens     direct p50/p99 ms     added p50/p99 ms     matching p50/p99 ms     recording p50/p99 ms   CPU ms")
    with process(stub_engine) as (_, _, port):
        engine = f"http://127.0.0.1:{port}"
        names = [str(tokens) for tokens in told.tokens]
        with our_stage(names, engine) as (_, pipe, opened):
            for tokens in told.tokens:
                rows[tokens] = asyncio.run(measure(engine, pipe, opened[str(tokens)], tokens, told.calls))
    first, last = rows[told.tokens[0]], rows[told.tokens[-1]]
    for i, what in enumerate(("added", "matching", "recording", "matching and recording", "CPU of the two")):
        print(f"{what:22} at {told.tokens[-1]:,} tokens {last[i] / first[i]:5.2f} x that at {told.tokens[0]:,}")


async def measure(engine: str, pipe: Connection, opened: tuple[str, str], tokens: int, calls: int) -> tuple[float, ...]:
    """Medians in ms: added, matching, recording, the two together, CPU time of the two."""
    talk = Talk(Words(), tokens, opened[0] + "/v1", opened[1])
    ids = msgspec.json.encode({"input_ids": np.random.default_rng(0).integers(0, 4000, tokens).tolist()})
    async with client() as http:
        for _ in range(3):
            await talk.call(http)
            await direct(http, engine, ids)
        spent(pipe)
        through, straight = [], []
        for _ in range(calls):  # in turn: what disturbs one disturbs the other
            through.append(await talk.call(http))
            straight.append(await direct(http, engine, ids))
    inside = spent(pipe)
    added = [a - percentile(straight, 50) for a in through]
    columns = [straight, added, inside.matching, inside.recording]
    both = [m + r for m, r in zip(inside.matching, inside.recording, strict=True)]
    cpu = [m + r for m, r in zip(inside.matching_cpu, inside.recording_cpu, strict=True)]
    shown = "".join(f"{1000 * percentile(c, 50):14.2f} /{1000 * percentile(c, 99):7.2f}" for c in columns)
    print(f"{tokens:7,}{shown}{1000 * percentile(cpu, 50):14.2f}", flush=True)
    return tuple(1000 * percentile(c, 50) for c in (*columns[1:], both, cpu))


async def direct(http: aiohttp.ClientSession, engine: str, ids: bytes) -> float:
    """Seconds of one call of the engine itself."""
    began = time.perf_counter()
    async with http.post(f"{engine}/generate", data=ids, headers={"Content-Type": "application/json"}) as response:
        await response.read()
    return time.perf_counter() - began


def spent(pipe: Connection) -> Spent:
    """What the calls since the last time went to."""
    pipe.send(("spent",))
    told: Spent = pipe.recv()
    return told


if __name__ == "__main__":
    main()
