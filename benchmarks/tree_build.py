"""Builds the tree of one extreme-long-horizon execution, and says what it costs.

A main history of ``--calls`` calls grows to ``--tokens`` tokens; every 50th call is retried and every 200th is followed
by a summary call, so that the tree branches. Printed: tokens a second, memory, the ratio to the naive record that keeps
each call's full prompt, and the same through the store. Run it on an idle machine: ``python benchmarks/tree_build.py``.
"""

from __future__ import annotations

import argparse
import resource
import time
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from opengyre.record.call import CommittedCall, digest_ids
from opengyre.record.draw import check_tree
from opengyre.record.store import Store
from opengyre.record.tree import Tree
from opengyre.record.types import CallMeta, Finish, Ids, Span

VOCABULARY = 150_000  # of current policies
TOOLS = tuple(f"tool_{i}" for i in range(24))  # as Claude Code has


class Traffic:
    """What a proxy would hand over, at a given size, and the seconds each part of the tree took."""

    def __init__(self, store: Store) -> None:
        self.tree, self.store, self.random = Tree(), store, np.random.default_rng(0)
        self.keys: list[bytes] = []
        self.seconds = dict.fromkeys(("match", "prompt ids", "commit", "store"), 0.0)
        self.seen = self.calls = 0

    def key(self) -> bytes:
        return blake2b((self.keys[-1] if self.keys else b"") + self.random.bytes(8), digest_size=16).digest()

    def call(self, keys: list[bytes], tail: Ids, answer: int, reply_key: bytes) -> None:
        """One model call; its new message is the whole tail."""
        start = time.perf_counter()
        at = self.tree.match(keys)
        matched = time.perf_counter()
        before = self.tree.prompt_ids(at)
        read = time.perf_counter()
        ids = self.random.integers(0, VOCABULARY, answer, np.int32)
        span = Span(ids, self.random.normal(-0.5, 0.2, answer).astype(np.float32), self.calls // 100, "cell-0")
        fresh = keys[at.n_messages :]
        call = CommittedCall(
            attach=at,
            tail_ids=tail if fresh else tail[-1:],
            marks=tuple((key, len(tail) - 1) for key in fresh),
            sampled=(span,),
            reply_key=reply_key,
            meta=CallMeta(f"call-{self.calls:06d}", "messages", 0.0, 1.0, Finish.STOP, True, tool_names=TOOLS),
            prompt_digest=digest_ids(before, tail if fresh else tail[-1:]),
            sampled_digest=digest_ids(ids),
        )
        self.calls += 1
        self.seen += len(before) + len(call.tail_ids) + answer
        made = time.perf_counter()
        self.store.put("e", call)
        stored = time.perf_counter()
        self.tree.commit(call)
        parts = (matched - start, read - matched, time.perf_counter() - stored, stored - made)
        for name, seconds in zip(self.seconds, parts, strict=True):
            self.seconds[name] += seconds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--calls", type=int, default=2000)
    options.add_argument("--tokens", type=int, default=1_000_000)
    told = options.parse_args()
    new = told.tokens // told.calls
    with TemporaryDirectory() as folder, Store.open(Path(folder) / "calls.db") as store:
        store.begin_execution("e", {})
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        traffic = Traffic(store)
        for turn in range(told.calls):
            tail = traffic.random.integers(0, VOCABULARY, new // 2, np.int32)
            traffic.keys.append(traffic.key())
            reply = traffic.key()
            traffic.call(traffic.keys, tail, new - new // 2, reply)
            if turn % 50 == 49:
                traffic.call(traffic.keys, tail, new - new // 2, reply)  # a lost reply: asked again, sampled anew
            traffic.keys.append(reply)
            if turn % 200 == 199:
                traffic.call([*traffic.keys, traffic.key()], tail[: new // 4], new, traffic.key())
        report(traffic, rss)
        tree = traffic.tree
        start = time.perf_counter()
        loaded = store.load_tree("e")
        print(f"load from store      {time.perf_counter() - start:8.2f} s")
        assert len(loaded) == len(tree) and loaded.unique_tokens == tree.unique_tokens
        store.close()
        print(f"file                 {store.path.stat().st_size / tree.unique_tokens:8.2f} bytes per unique token")
    start = time.perf_counter()
    deepest = max(tree.leaves(), key=lambda leaf: tree.node(leaf).start)
    path = tree.rebuild(deepest)
    print(f"rebuild longest      {time.perf_counter() - start:8.3f} s for {len(path.ids):,} tokens")
    start = time.perf_counter()
    wrong = check_tree(tree)
    print(f"check all calls      {time.perf_counter() - start:8.2f} s, {len(wrong)} wrong")


def report(traffic: Traffic, rss_before: int) -> None:
    tree, calls = traffic.tree, traffic.calls
    naive, grown = 4 * traffic.seen, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_before)
    print(f"calls                {calls:8,}   leaves {len(tree.leaves())}")
    print(f"tokens stored        {tree.unique_tokens:8,}   seen by the engine {traffic.seen:,}")
    for name, seconds in traffic.seconds.items():
        print(f"{name:20} {1000 * seconds / calls:8.3f} ms per call")
    rate = tree.unique_tokens / (traffic.seconds["match"] + traffic.seconds["commit"])
    print(f"tree (match, commit) {rate:8,.0f} tokens/s")
    ratio = f"full prompts {naive / 2**20:,.0f} MiB: {naive / grown:.0f} x"
    print(f"memory               {grown / 2**20:8.1f} MiB   {ratio}")


if __name__ == "__main__":
    main()
