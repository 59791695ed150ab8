"""The report: its figures, its words, and a page that is whole, safe and closed to the network."""

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from opengyre.watch.history import History, Lane
from opengyre.watch.intervals import difference, wilson
from opengyre.watch.report import write_report
from opengyre.watch.state import Phase
from opengyre.watch.verdict import judge
from synthetic_run import Synthetic, write
from test_watch_state import START, ev
from tree_making import tree_json

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that every element is closed in order; keeps the data block and the text people see."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.data, self.words = "", ""
        self.links: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset", "action", "data")]
        if tag not in VOID:
            self.open.append(tag if dict(attrs).get("id") != "data" else "script#data")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop().split("#")[0] == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script#data":
            self.data += data
        elif not self.open or self.open[-1] not in ("script", "style"):
            self.words += data


def report(run_dir: Path, events: list[dict[str, Any]]) -> tuple[dict[str, Any], Page, str]:
    write(run_dir, events)
    html = write_report(run_dir).read_text("utf-8")
    page = Page(html)
    return json.loads(page.data), page, html


@cache
def run() -> list[dict[str, Any]]:
    return Synthetic(steps=5, held_out=(12, 4)).run()


def test_the_figures_are_those_of_the_log(tmp_path: Path) -> None:
    events = run()
    data, page, _ = report(tmp_path, events)
    steps = [e for e in events if e["kind"] == "step"]
    done = [e for e in events if e["kind"] == "execution" and e["state"] == "done"]
    switches = [e for e in events if e["kind"] == "switch"]
    assert [s["step"] for s in data["steps"]] == [1, 2, 3, 4, 5]
    assert [s["loss"] for s in data["steps"]] == [e["loss"] for e in steps]
    assert data["totals"]["executions"] == len(data["executions"]) == len(done)
    assert sum(o["train"] + o["held_out"] for o in data["outcomes"]) == len(done)
    assert data["totals"]["excluded_total"] == sum(e["reward"] is None for e in done)
    assert data["totals"]["sampled_tokens"] == sum(e["sampled_tokens"] for e in done)
    assert sum(d["n"] for d in data["switches"]["by_direction"].values()) == len(switches)
    flips = [e["total_s"] for e in switches if e["direction"] == "rollout>train"]
    assert data["switches"]["by_direction"]["rollout>train"]["max_s"] == pytest.approx(max(flips), abs=1e-3)
    assert sum(c["micro_steps"] for c in data["cells"]) == 5 * 12
    first, last = [e for e in events if e["kind"] == "eval"]
    assert (data["verdict"]["before"]["rate"], data["verdict"]["after"]["rate"]) == (
        first["pass_rate"],
        last["pass_rate"],
    )
    assert data["run"]["status"] == "ended" and "elastic" in page.words
    for c in data["cells"]:
        assert sum(c["share"].values()) == pytest.approx(1, abs=1e-3)
        for (_, stop, *_), (start, *_) in zip(c["segments"], c["segments"][1:], strict=False):
            assert stop == start


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    _, page, html = report(tmp_path, run())
    assert page.links == []
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttpRequest", html)
    assert "default-src 'none'" in html and "{{" not in page.words and "{%" not in html
    assert len(html) < 3_000_000


@pytest.mark.parametrize(
    "evil", ["</script><script>alert(1)</script>", "<img onerror=x>", "<!--<script>", "\u2028'\"&"]
)
def test_text_of_others_stays_text(tmp_path: Path, evil: str) -> None:
    start = {**START, "name": evil, "policy": evil}
    done = {"state": "done", "outcome": evil, "reward": None, "task": evil}
    events = [start, ev(1, "cell", cell=evil, state=evil, reason=evil), ev(2, "note", level=evil, text=evil)]
    events += [
        ev(3, "execution", execution=evil, **done),
        ev(4, "switch", cell=evil, direction=evil, total_s=1, phases={evil: 1}),
    ]
    data, page, html = report(tmp_path, events)
    assert data["run"]["name"] == data["notes"][0][2] == data["executions"][0][6] == evil
    assert evil in page.words  # as text, not as markup
    assert html.count("<script") == 2 and "<img" not in html


@pytest.mark.parametrize("cut", [0, 1, 2, 40, 700, -1])
def test_an_empty_and_an_aborted_run_have_a_report(tmp_path: Path, cut: int) -> None:
    data, page, _ = report(tmp_path, run()[:cut])
    assert data["run"]["status"] == ("empty" if cut == 0 else "stopped")
    assert ("nothing recorded yet" if cut == 0 else "stopped without an end") in page.words


def test_a_run_folder_without_a_log_has_a_report(tmp_path: Path) -> None:
    assert "No step was committed." in Page(write_report(tmp_path).read_text("utf-8")).words


def test_bare_events_have_a_report(tmp_path: Path) -> None:
    kinds = [
        "run",
        "cell",
        "switch",
        "waterlevel",
        "execution",
        "micro_step",
        "step",
        "eval",
        "decision",
        "note",
        "new",
    ]
    report(tmp_path, [ev(i, kind) for i, kind in enumerate(kinds)])
    report(
        tmp_path, [{}, ev(1, "step", loss=float("nan")), ev(2, "execution", state="done"), ev(3, "run", state="end")]
    )


def test_a_long_run_is_thinned_but_its_counts_are_not(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{**START, "cells": [{"cell": f"c{i}", "core": i == 0} for i in range(200)]}]
    for i in range(1, 100_000):
        kind, k = i % 5, i // 5
        cell = f"c{k % 200}"
        if kind == 0:
            events.append(ev(i, "waterlevel", queued=k % 97, running=8 + 1000 * (k == 777), rollout_cells=3, slots=8))
        elif kind == 1:
            state = "rollout" if (k // 200) % 2 else "train"
            events.append(ev(i, "cell", cell=cell, state=state, reason="x" * 30))
        elif kind == 2:
            events.append(
                ev(
                    i,
                    "execution",
                    execution=f"execution-{k}",
                    task="t" * 20,
                    state="done",
                    outcome="finished",
                    reward=1.0,
                )
            )
        elif kind == 3:
            events.append(
                ev(i, "micro_step", step=k // 9, micro=k % 9, cell=cell, state="done", tokens=10, seconds=2.0)
            )
        else:
            events.append(ev(i, "step", step=k, version=k, loss=0.1, pass_rate=0.5, step_s=5.0, tokens=10))
    data, _, html = report(tmp_path, events)
    assert len(html.encode()) < 3_000_000
    assert data["totals"]["executions"] == 20_000 and data["totals"]["cells"] == 200
    assert max(w[2] for w in data["waterlevel"]) == 1008  # the one peak survives
    assert data["steps"][-1]["step"] == 19_999


# -- words -----------------------------------------------------------------------------------------------------------


def evaluation(version: int, passes: int, n: int = 96) -> dict[str, Any]:
    return {"version": version, "pass_rate": passes / n if n else None, "executions": n}


def test_intervals_are_the_published_ones() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998 (a), table I
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert difference((48, 80), (56, 70)) == pytest.approx((0.0524, 0.3339), abs=5e-5)  # Newcombe 1998 (b), table II
    assert wilson(0, 0) == (0.0, 1.0) and difference((0, 0), (1, 1)) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("evals", "rate", "tone", "says"),
    [
        ([], 1e-3, "unknown", "not measured"),
        ([evaluation(0, 20)], 1e-3, "unknown", "20.8 %"),
        ([evaluation(0, 20), evaluation(6, 60)], 1e-3, "good", "a gain beyond noise"),
        ([evaluation(0, 60), evaluation(6, 20)], 1e-3, "bad", "a loss beyond noise"),
        ([evaluation(0, 20), evaluation(6, 24)], 1e-3, "flat", "within noise"),
        ([evaluation(0, 20), evaluation(0, 24)], 1e-3, "flat", "on the same weights"),
        ([evaluation(0, 20), evaluation(6, 24)], 0.0, "flat", "no learning expected, none seen"),
        ([evaluation(0, 20), evaluation(6, 60)], 0.0, "bad", "more than noise"),
        ([evaluation(0, 0, 0)], 1e-3, "unknown", "not measured"),
    ],
)
def test_the_verdict_in_words(evals: list[dict[str, Any]], rate: float, tone: str, says: str) -> None:
    verdict = judge(evals, learning_rate=rate, steps=6)
    assert verdict.tone == tone and says in verdict.headline.replace("\u00a0", " ")


# -- time ------------------------------------------------------------------------------------------------------------


def test_shares_of_a_cells_time() -> None:
    h = History(
        [
            START,
            ev(0, "cell", cell="a", state="rollout"),
            ev(0, "waterlevel", queued=0, running=2, rollout_cells=1, slots=4),
            ev(30, "waterlevel", queued=0, running=0, rollout_cells=1, slots=4),  # 10 s with nothing to serve
            ev(40, "cell", cell="a", state="draining"),
            ev(50, "cell", cell="a", state="train"),
            ev(50, "switch", cell="a", direction="rollout>train", total_s=10.0),
            ev(60, "micro_step", step=1, micro=0, cell="a", state="claimed"),
            ev(80, "micro_step", step=1, micro=0, cell="a", state="done", seconds=20.0, tokens=1),
            ev(100, "run", state="end"),
        ]
    )
    assert h.shares["a"] == pytest.approx({"rollout": 0.3, "train": 0.2, "switching": 0.1, "idle": 0.4, "off": 0})


def test_a_switch_is_carved_out_where_the_cell_named_no_states_of_its_own() -> None:
    lane = Lane("a")
    lane.enter(0, Phase.ROLLOUT, "rollout")
    lane.enter(50, Phase.TRAIN, "train")
    lane.carve(40, 50, "rollout>train")
    lane.enter(90, Phase.ROLLOUT, "rollout")
    spans = [(s.start, s.stop, s.phase.value) for s in lane.segments if s.stop > s.start]
    assert spans == [(0, 40, "rollout"), (40, 50, "switching"), (50, 90, "train")]


def test_a_resumed_run_shows_where_it_was_down(tmp_path: Path) -> None:
    again = {k: v for k, v in START.items() if k not in ("t", "kind", "state")}
    events = [
        START,
        ev(0, "cell", cell="a", state="rollout"),
        ev(10, "run", state="resume", **again),
        ev(12, "cell", cell="a", state="rollout"),
    ]
    data, page, _ = report(tmp_path, [*events, ev(20, "run", state="end")])
    lane = next(c for c in data["cells"] if c["cell"] == "a")
    assert [s[:3] for s in lane["segments"]] == [[0, 10, "rollout"], [10, 12, "off"], [12, 20, "rollout"]]
    assert data["run"]["resumes"] == [10] and "resumed 1×" in page.words


# -- trees -----------------------------------------------------------------------------------------------------------


def test_a_tree_is_told_as_json() -> None:
    tree = tree_json()
    nodes = {n["id"]: n for n in tree["nodes"]}
    lengths = {i: sum(s["n"] for s in n["spans"]) for i, n in nodes.items()}
    assert sum(lengths.values()) == tree["unique_tokens"]
    for n in tree["nodes"]:
        assert n["parent"] < n["id"] and n["offset"] <= lengths.get(n["parent"], 0)
        assert n["start"] == (nodes[n["parent"]]["start"] + n["offset"] if n["parent"] else n["offset"])
        for s in n["spans"]:
            assert 0 <= s["trained"] <= (s["n"] if s["trainable"] else 0)
            assert (s["kind"] == "sampled") == (s["version"] is not None)
    assert {"main", "main_summary", "sub_agent_summary"} <= set(tree["leaves"].values())
    assert {s["version"] for n in tree["nodes"] for s in n["spans"]} == {None, 0, 3, 4}
    kept = [s for n in tree["nodes"] for s in n["spans"] if s["kind"] == "sampled" and not s["trainable"]]
    assert len(kept) == 1  # the reply that was never delivered


def test_readable_trees_are_in_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "trees"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(tree_json(turns=3)))
    (folder / "torn.json").write_text('{"schema": 1, "no')
    (folder / "later.json").write_text('{"schema": 2, "nodes": [1]}')
    (folder / "list.json").write_text("[]")
    data, page, _ = report(tmp_path, run())
    assert [t["execution"] for t in data["trees"]] == ["q7-3-1"] and "Trajectory tree" in page.words
