"""Mutated requests over the three formats against whole proxies: no 5xx but those injected, no other session touched.

``python benchmarks/proxy_fuzz.py --requests 100000 --processes 4`` is the full figure; the tests send a few hundred.
Every process has a proxy and clients of its own. Printed: seconds, rate, answers by status, memory as it went. Ends
with status 1 and the first failures if anything did not hold. See ``tests/fuzzing.py`` for what is checked and
``tests/mutations.py`` for what is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fuzzing import Report, fuzz

SHOWN = 10  # failures; the first ones say it


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--requests", type=int, default=5000)
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--seed", type=int, default=0, help="of the first process; the others count on from it")
    options.add_argument("--failures", type=float, default=0.005, help="share of engine calls and recordings that fail")
    options.add_argument("--minutes", type=float, default=float("inf"), help="stop early, and say how many were sent")
    told = options.parse_args()
    began = time.perf_counter()
    with ProcessPoolExecutor(told.processes, multiprocessing.get_context("spawn")) as pool:
        seeds = range(told.seed, told.seed + told.processes)
        runs = [
            pool.submit(one, told.requests // told.processes, seed, told.failures, told.minutes * 60) for seed in seeds
        ]
        reports = [run.result() for run in runs]
    return tell(reports, time.perf_counter() - began)


def one(requests: int, seed: int, failures: float, limit_s: float) -> Report:
    """One proxy, in this process."""
    with TemporaryDirectory() as folder:
        return asyncio.run(fuzz(Path(folder), requests, seed=seed, failures=failures, limit_s=limit_s))


def tell(reports: list[Report], seconds: float) -> int:
    sent = sum(report.requests for report in reports)
    broken = [failure for report in reports for failure in report.failures]
    print(f"{sent} requests in {seconds:.0f} s: {sent / seconds:.0f} a second")
    print(f"injected failures {sum(report.injected for report in reports)}, broken promises {len(broken)}")
    for status, number in sum((report.statuses for report in reports), Counter[str]()).most_common():
        print(f"{status:16} {number:8} {number / sent:7.2%}")
    for report in reports:
        tenths = report.rss_mib[:: max(1, len(report.rss_mib) // 10)]
        print("resident MiB as it went:", " ".join(f"{rss:.0f}" for rss in tenths))
    for failure in broken[:SHOWN]:
        print(failure)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
