"""What is shown while a run goes: golden lines, the live picture, metrics lines and the Prometheus snapshot."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from opengyre.config import WatchConfig
from opengyre.watch import text
from opengyre.watch.lines import LineView
from opengyre.watch.metrics import MetricsWriter, prometheus
from opengyre.watch.screen import screen
from opengyre.watch.state import RunState
from opengyre.watch.terminal import LiveView, make_view
from synthetic_run import Synthetic
from test_watch_state import START, ev, step

LOG = [
    START,
    ev(1.5, "cell", cell="a", state="rollout"),
    ev(1.5, "cell", cell="core", state="train"),
    ev(2, "waterlevel", queued=3, running=4, rollout_cells=1, slots=4),
    ev(3, "waterlevel", queued=2, running=4, rollout_cells=1, slots=4),
    ev(7, "waterlevel", queued=1, running=4, rollout_cells=1, slots=4),
    ev(8, "eval", version=0, pass_rate=0.25, reward_mean=0.4, executions=48, tasks=24),
    ev(9, "switch", cell="a", direction="rollout>train", total_s=0.61, phases={"drain_s": 0.4, "pull_s": 0.21},
       moved_calls=1, ok=True),
    ev(9.5, "switch", cell="a", direction="train>rollout", total_s=60.0, phases={}, ok=False),
    ev(10, "note", level="info", text="checkpoint written"),
    ev(11, "note", level="warning", text="cell a: \x1b[31mlate\x1b[0m\nby 3 s – probing"),
    step(65.25, 1, reward_mean=0.3, loss=-0.0123, grad_norm=0.8, clip_fraction=0.1, executions=31, groups=4,
         degenerate=1),
    ev(66, "run", state="end", reason="interrupted"),
]  # fmt: skip

GOLDEN = """\
[   0.00s] run start: demo, policy elastic, 4 steps, 2 cells (1 core), learning rate 0.001
[   7.00s] step 0/4, waterlevel 5 (1 queued, 4 running), cells 1 rollout, 1 train, 0 tok/s sampled
[   8.00s] evaluation of version 0: 12/48 passed = 25.0 % (95 %: 15 to 39 %), reward 0.400
[   9.00s] switch a rollout -> train in 0.61s (drain 0.40s, pull 0.21s), 1 call moved
[   9.50s] switch a train -> rollout FAILED in 1m 00s
[   11.0s] warning: cell a: late by 3 s ? probing
[  1m 05s] step 1/4, version 1, pass 10.0 %, reward 0.300, loss -0.0123, grad 0.800, clip 10.0 %, 31 executions, \
1 excluded, 1/4 groups without variance, took 10.0s, ETA 30.0s
[  1m 06s] run end (interrupted): 1 step, 0 executions, 1m 06s
"""


def test_off_a_terminal_there_are_plain_lines() -> None:
    out = io.StringIO()
    view = make_view(WatchConfig(), out)
    assert isinstance(view, LineView)
    for event in LOG:
        view(event)
    view.close()
    assert out.getvalue() == GOLDEN


def test_status_lines_are_rationed() -> None:
    out = io.StringIO()
    view = LineView(out, line_every_s=5)
    for i in range(1000):
        view(START if i == 0 else ev(i / 10, "waterlevel", queued=i, running=0, rollout_cells=1, slots=4))
    assert len(out.getvalue().splitlines()) == 1 + 19


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    out = io.StringIO()
    view = LineView(out, line_every_s=5)
    out.close()
    for event in LOG:
        view(event)
    assert view.state.step == 1


BIG = Synthetic(steps=2, satellites=30, held_out=(4, 1)).run()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("upto", [0, 1, 200, 10_000])
def test_the_picture_fits_the_terminal(width: int, upto: int) -> None:
    state = RunState(BIG[:upto])
    out = io.StringIO()
    Console(file=out, width=width, height=24, highlight=False).print(screen(state, state.t + 1, width, 24))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= width
    if upto == 200:
        assert "more" in out.getvalue() and "waterlevel" in out.getvalue()


def test_the_live_view_draws_and_gives_the_terminal_back() -> None:
    out = io.StringIO()
    view = make_view(WatchConfig(live="on"), out)
    assert isinstance(view, LiveView)
    for event in LOG:
        view(event)
    view.close()
    shown = out.getvalue()
    assert "demo" in shown and "\x1b[?25h" in shown  # the cursor is visible again
    assert "\x1b[?1049h" not in shown  # no alternate screen
    assert "\x1b[31mlate" not in shown


def test_a_resumed_run_knows_its_past() -> None:
    out = io.StringIO()
    view = make_view(WatchConfig(), out, past=LOG[:-1])
    view({**START, "t": 70.0, "state": "resume"})
    view(step(80, 2, reward_mean=0.5))
    assert view.state.trend("pass_rate") == [0.1, 0.2] and len(view.state.evals) == 1
    assert [line[11:27] for line in out.getvalue().splitlines()] == ["run resume: demo", "step 2/4, versio"]


def test_metrics_lines_are_flat_and_survive_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":0}\n{"ste')
    writer = MetricsWriter(path)
    for event in LOG:
        writer(event)
    writer.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 0, 1]
    assert rows[1] == {"step": 0, "version": 0, "t": 8, "eval/pass_rate": 0.25, "eval/reward_mean": 0.4,
                       "eval/executions": 48, "eval/tasks": 24}  # fmt: skip
    assert rows[2]["train/loss"] == -0.0123 and rows[2]["switch/rollout_to_train_median_s"] == 0.61
    assert rows[2]["rollout/queued"] == 1 and rows[2]["cells/train"] == 1
    assert all(isinstance(v, int | float) for row in rows for v in row.values())


def test_the_prometheus_snapshot_is_well_formed() -> None:
    state = RunState([*LOG, ev(67, "execution", execution="x", split="train", state="done", outcome='odd"\\\n')])
    lines = prometheus(state).splitlines()
    sample = re.compile(r'opengyre_[a-z_]+(\{[a-z_]+="(\\.|[^"\\\n])*"(,[a-z_]+="(\\.|[^"\\\n])*")*\})? -?[0-9.e+-]+')
    assert all(line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line) for line in lines)
    assert 'opengyre_waterlevel{state="queued"} 1' in lines
    assert 'opengyre_switch_seconds_median{direction="rollout>train"} 0.61' in lines
    assert 'opengyre_switches_failed_total{direction="train>rollout"} 1' in lines
    assert "opengyre_steps_total 1" in lines and "opengyre_held_out_pass_rate 0.25" in lines
    assert len({line for line in lines if line.startswith("# TYPE")}) == sum(
        line.startswith("# TYPE") for line in lines
    )
    assert prometheus(RunState())


def test_short_texts() -> None:
    assert [text.duration(s) for s in (None, 0.5, 9.996, 59.96, 3599.6, 3600, 90_000)] == [
        "-", "0.50s", "10.0s", "1m 00s", "1h 00m", "1h 00m", "1d 01h",
    ]  # fmt: skip
    assert [text.count(n) for n in (0, 812, 12_345, 999_999, 4_560_000)] == ["0", "812", "12.3k", "1000k", "4.56M"]
    assert [text.figure(x) for x in (None, float("nan"), 0.43, 100.0)] == ["-", "-", "0.430", "100"]
    assert text.plain("a\x1b[1;31mb\x1b[0m\r\nc\x1b]0;title\x07d") == "ab cd"
    assert text.sparkline([0, 1, 2, 3], 2, low=0, high=3) == "▂▇" and text.sparkline([], 5) == ""
