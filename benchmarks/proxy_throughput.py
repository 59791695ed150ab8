"""Calls a second and core at long histories: ours, rllm-model-gateway and litellm's proxy before the same engine.

Every session has ``--tokens`` of history and all are at work at once; each call sends the whole history and adds about
500 tokens. Counted are calls per second of the proxy's *CPU time* (user and system, all threads), so that a busy
machine does not change the result; ours records tokens and log-probabilities durably, the peers as they do by default.
``--peers PYTHON`` names the interpreter of an environment with the peers: ``pip install rllm-model-gateway
"litellm[proxy]==1.75.0"``. Full size: ``--sessions 200 --tokens 60000``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import psutil
from proxy_stage import Talk, Words, client, cpu_s, our_stage, percentile, process, stub_engine

START_S = 120.0  # litellm imports for half a minute on a busy machine


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--sessions", type=int, default=20)
    options.add_argument("--tokens", type=int, default=60_000)
    options.add_argument("--calls", type=int, default=10, help="timed calls per session")
    options.add_argument("--at-once", type=int, default=16, help="calls in flight")
    options.add_argument("--peers", help="Python of an environment with rllm-model-gateway and litellm[proxy]")
    told = options.parse_args()
    names = [f"s{i}" for i in range(told.sessions)]
    rates = {}
    with process(stub_engine) as (_, _, port):
        engine = f"http://127.0.0.1:{port}"
        with our_stage(names, engine) as (proxy, _, opened):
            rates["opengyre"] = asyncio.run(measure("opengyre", proxy, told, list(opened.values()), "/v1"))
        for name, serve in (("rllm-model-gateway", rllm), ("litellm", litellm)):
            if not told.peers or not has(told.peers, name):
                print(f"{name:20} not installed")
                continue
            with serve(told.peers, engine, names) as (proxy, opened):
                rates[name] = asyncio.run(measure(name, proxy, told, opened, ""))
    ours, peers = rates.pop("opengyre"), rates
    for name, rate in peers.items():
        print(f"opengyre / {name:20} {ours / rate:6.2f} x")


async def measure(
    name: str, proxy: psutil.Process, told: argparse.Namespace, opened: list[tuple[str, str]], path: str
) -> float:
    """Calls per CPU second of the proxy, after one untimed call per session."""
    words = Words()
    talks = [Talk(words, told.tokens, url + path, key) for url, key in opened]
    gate = asyncio.Semaphore(told.at_once)
    latencies: list[float] = []

    async def talk(http: aiohttp.ClientSession, one: Talk, calls: int) -> None:
        for _ in range(calls):
            async with gate:
                latencies.append(await one.call(http))

    async with client() as http:
        began, used = time.perf_counter(), cpu_s(proxy)
        await asyncio.gather(*(talk(http, one, 1) for one in talks))
        cold = (cpu_s(proxy) - used) / len(talks)
        latencies.clear()
        began, used = time.perf_counter(), cpu_s(proxy)
        await asyncio.gather(*(talk(http, one, told.calls) for one in talks))
        wall, used = time.perf_counter() - began, cpu_s(proxy) - used
    calls = told.calls * len(talks)
    print(
        f"{name:20} {calls / used:8.1f} calls per CPU second   {calls / wall:8.1f} per second   first call "
        f"{1000 * cold:7.1f} ms CPU   p50 {1000 * percentile(latencies, 50):7.1f} ms   "
        f"p99 {1000 * percentile(latencies, 99):7.1f} ms   RSS {proxy.memory_info().rss / 2**20:6.0f} MiB",
        flush=True,
    )
    return calls / used


def has(python: str, package: str) -> bool:
    """Is the package in that environment?"""
    ask = f"from importlib.metadata import version; version({package!r})"
    return subprocess.run([python, "-c", ask], capture_output=True).returncode == 0


@contextlib.contextmanager
def rllm(python: str, engine: str, names: list[str]) -> Iterator[tuple[psutil.Process, list[tuple[str, str]]]]:
    """The gateway with its SQLite store."""
    with TemporaryDirectory() as folder:
        port = free_port()
        config = Path(folder) / "config.yaml"
        worker = f"workers:\n  - url: {engine}/v1\n    model_name: m\n"
        config.write_text(f"host: 127.0.0.1\nport: {port}\n{worker}store_worker: sqlite\ndb_path: {folder}/db.sqlite\n")
        with started([python, "-m", "rllm_model_gateway", "--config", str(config)], f"{port}/health", folder) as child:
            yield child, [(f"http://127.0.0.1:{port}/sessions/{name}/v1", "key") for name in names]


@contextlib.contextmanager
def litellm(python: str, engine: str, names: list[str]) -> Iterator[tuple[psutil.Process, list[tuple[str, str]]]]:
    """litellm's proxy with one worker, telemetry off."""
    with TemporaryDirectory() as folder:
        port = free_port()
        config = Path(folder) / "config.yaml"
        config.write_text(
            f"model_list:\n  - model_name: m\n    litellm_params:\n      model: openai/m\n      api_base: {engine}/v1\n"
            "      api_key: none\nlitellm_settings:\n  telemetry: false\n  request_timeout: 600\n"
        )
        command = [
            str(Path(python).parent / "litellm"),
            "--config",
            str(config),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
        ]
        with started(command, f"{port}/health/liveliness", folder) as child:
            yield child, [(f"http://127.0.0.1:{port}/v1", "key")] * len(names)


@contextlib.contextmanager
def started(command: list[str], health: str, folder: str) -> Iterator[psutil.Process]:
    """A server's process, once it answers."""
    log = Path(folder) / "log"
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DISABLE_ADMIN_UI": "True"}
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=folder)
    try:
        until = time.monotonic() + START_S
        while not answers(health):
            if child.poll() is not None or time.monotonic() > until:
                sys.exit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait()


def answers(health: str) -> bool:
    port, _, path = health.partition("/")
    try:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=1) as conn:
            conn.sendall(f"GET /{path} HTTP/1.0\r\n\r\n".encode())
            return b" 200 " in conn.recv(100)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
