"""Paced cells: modelled time is what the cost model says, and nothing but time is modelled."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from faulty_cells import run_without_waiting
from opengyre.cluster.base import CellSpec
from opengyre.config import PacedConfig, build
from opengyre.errors import CellError, ConfigError, EngineError, TrainingError
from opengyre.paced.cell import PacedCell, PacedCluster
from opengyre.paced.engine import PacedEngine
from opengyre.paced.pace import Pace, cost_model, pace_of
from opengyre.paced.speech import Speech
from opengyre.paced.workload import PacedHarness, PacedTasks, paced_config
from opengyre.rollout.base import REGIONS, GenerateRequest, TokenChunk
from opengyre.rollout.program import ProgramEngine, Said
from opengyre.rollout.tokens import TokenIds
from opengyre.samples.types import to_wire
from opengyre.simulate.cost import CostModel
from opengyre.simulate.faults import moments
from opengyre.simulate.workload import load_workload
from policies import renderer
from training_models import make_sample

SPEED = 10.0
COST = CostModel(decode_base_s=0.1, decode_call_s=0.1, prefill_tokens_per_s=100.0, kv_tokens_per_s=1000.0, pull_s=3.0)


class Stage:
    """An engine, and when each call's tokens came, in modelled seconds."""

    def __init__(self, program: Any = None, *, scale: float = 1.0) -> None:
        self.pace = Pace(SPEED, asyncio.get_running_loop().time)
        self.speech = Speech(renderer(), program)
        self.heard: dict[str, list[tuple[float, TokenChunk]]] = {}
        self.scale = scale
        self.engine = self.cell()

    def cell(self) -> PacedEngine:
        engine = PacedEngine(self.pace, COST, self.speech, token_scale=self.scale, send=self._hear)
        engine.regions, engine.version = set(REGIONS), 1
        return engine

    def _hear(self, call_id: str, chunk: TokenChunk) -> None:
        self.heard.setdefault(call_id, []).append((self.pace.now(), chunk))

    async def ends(self, *calls: str) -> list[float]:
        """When each call ended."""
        while not all(self.heard.get(c) and self.heard[c][-1][1].finish for c in calls):
            await self.pace.sleep(1.0)
        return [self.heard[c][-1][0] for c in calls]

    def said(self, call: str) -> list[int]:
        return [i for _, chunk in self.heard[call] for i in chunk.ids]


def request(call: str, prompt: int, sample: int, kv: dict[str, Any] | None = None) -> GenerateRequest:
    return GenerateRequest(call, f"session of {call[:32]}", TokenIds(np.ones(prompt, np.int32)), sample, [], kv=kv)


def played(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_without_waiting(play())


def test_a_call_takes_its_prefill_and_its_decode_steps():
    async def play() -> None:
        stage = Stage()
        await stage.engine.submit(request("a", 100, 50))
        (end,) = await stage.ends("a")
        assert end == pytest.approx(1.0 + 50 * 0.2, rel=0.05)
        assert len(stage.said("a")) == 50 and stage.heard["a"][-1][1].finish == "length"
        await stage.engine.submit(request("a", 150, 10))  # goes on in the same session: its prefix is cached
        stage.heard.clear()
        (again,) = await stage.ends("a")
        assert stage.heard["a"][0][1].cached_tokens == 150
        assert again - end == pytest.approx(10 * 0.2, abs=1.1)
        stage.engine.close()

    played(play)


def test_calls_share_decode_steps_and_tokens_count_as_many_as_they_stand_for():
    async def play() -> None:
        stage = Stage(scale=2.0)
        for call in "ab":
            await stage.engine.submit(request(call, 50, 40))
        ends = await stage.ends("a", "b")
        assert ends[0] == pytest.approx(2 * 1.0 + 40 * 2 * 0.3, rel=0.05) and ends[1] == ends[0]
        stage.engine.close()

    played(play)


@pytest.mark.parametrize("moves_kv", [True, False])
def test_a_moved_call_goes_on_where_it_was(moves_kv):
    async def play() -> None:
        stage = Stage()
        other = stage.cell()
        await stage.engine.submit(request("a" * 32 + "0000", 1000, 100))
        while not stage.heard:
            await stage.pace.sleep(1.0)
        moved = stage.engine.preempt(export_kv=moves_kv)
        first = stage.said("a" * 32 + "0000")
        assert moved == (1, 1000 + len(first)) and 0 < len(first) < 100
        kv = stage.heard["a" * 32 + "0000"][-1][1].kv
        began = stage.pace.now()
        await other.submit(request("a" * 32 + "0001", 1000 + len(first), 100 - len(first), kv))
        (end,) = await stage.ends("a" * 32 + "0001")
        assert len(first) + len(stage.said("a" * 32 + "0001")) == 100
        again = (1000 + len(first)) / (1000.0 if moves_kv else 100.0)
        assert end - began == pytest.approx(again + (100 - len(first)) * 0.2, rel=0.1)
        stage.engine.close()
        other.close()

    played(play)


def test_other_weights_void_what_was_computed():
    async def play() -> None:
        stage = Stage()
        await stage.engine.submit(request("a", 1000, 50))
        while not stage.heard:
            await stage.pace.sleep(1.0)
        stage.engine.set_version(2)
        (end,) = await stage.ends("a")
        assert end >= 2 * 10.0 + 50 * 0.2  # prefilled twice
        assert [chunk.version for _, chunk in stage.heard["a"]][-1] == 2 and len(stage.said("a")) == 50
        stage.engine.close()

    played(play)


def test_an_engine_without_all_regions_refuses():
    async def play() -> None:
        stage = Stage()
        stage.engine.regions -= {"kv"}
        with pytest.raises(EngineError, match="is not serving"):
            await stage.engine.submit(request("a", 1, 1))
        stage.engine.close()

    played(play)


def test_a_program_says_what_is_said():
    async def play() -> None:
        render = renderer()
        stage = Stage(ProgramEngine(render, lambda turns, random: Said("hello there")))
        await stage.engine.submit(request("a", 5, 500))
        await stage.ends("a")
        assert render.decode(render.without_stop(stage.said("a"))) == "hello there"
        assert stage.heard["a"][-1][1].finish == "stop"
        stage.engine.close()

    played(play)


def test_what_is_counted_twice_is_found_at_the_commit():
    async def play() -> None:
        config = build({"paced": {"speed": SPEED}})
        pace = Pace(SPEED, asyncio.get_running_loop().time)
        spec = CellSpec("core", True, "run", {}, "")
        core = PacedCell(spec, lambda op, args: None, config, pace, COST, Speech(renderer(), None), {})
        sample = to_wire(make_sample([1, 2, 3], [0, 1, 1], name="a"))
        stats = await core.call("micro_step", samples=[sample])
        assert stats["tokens"] == 2 and stats["seconds"] == pytest.approx(3 / COST.train_tokens_per_s)
        assert (await core.call("commit", n_executions=1))["version"] == 1
        assert (await core.call("commit", n_executions=1))["version"] == 1  # nothing was learned
        for _ in range(2):
            await core.call("micro_step", samples=[sample])
        with pytest.raises(TrainingError, match="counted twice"):
            await core.call("commit", n_executions=1)
        await core.stop(0.0)

    played(play)


def test_a_cell_is_lost_in_the_middle_of_its_work_and_back_after_its_restart():
    async def play() -> None:
        paced = {"speed": SPEED, "lost_at_h": {"core": [0.01, 0.0101, 0.2]}}
        pace = Pace(SPEED, asyncio.get_running_loop().time)
        cluster = PacedCluster(build({"paced": paced}), pace, COST, Speech(renderer(), None))
        spec = CellSpec("core", True, "run", {}, "")
        first = await cluster.start(spec, lambda op, args: None)
        with pytest.raises(CellError, match="ended during publish"):
            while True:
                await first.call("publish", key="w")
        assert pace.now() == pytest.approx(36.0, abs=0.1)
        assert "lost" in await first.wait()
        with pytest.raises(CellError, match="is gone"):
            await first.call("load")
        second = await cluster.start(spec, lambda op, args: None)
        assert pace.now() == pytest.approx(36.0 + COST.restart_s, abs=0.1)  # the loss meanwhile hit nobody
        assert (await second.call("load"))["running"] == 0
        await second.wait()
        assert pace.now() == pytest.approx(720.0, abs=0.1)
        await cluster.close()
        with pytest.raises(ConfigError, match="satellite-7"):
            PacedCluster(build({"paced": {"lost_at_h": {"satellite-7": [1.0]}}}), pace, COST, Speech(renderer(), None))

    played(play)


def test_losses_are_at_the_same_moments_whatever_else_happens():
    chance = list(itertools.islice(moments("core", 2.0, {}, 0), 1000))
    assert chance == sorted(chance) and chance[-1] / 1000 == pytest.approx(7200, rel=0.1)
    assert chance[:5] != list(itertools.islice(moments("satellite-1", 2.0, {}, 0), 5))
    both = moments("core", 2.0, {"core": [0.5, 0.25]}, 0)
    first = [m for m in itertools.islice(both, 10) if m in (900.0, 1800.0)]
    assert first == [900.0, 1800.0]
    assert list(moments("core", 0.0, {"core": [1.0]}, 0)) == [3600.0]


def test_executions_are_those_that_the_simulator_draws(tmp_path):
    config = paced_config("qwen3.8-2.4t", "elastic", tmp_path, speed=100.0, change={"executions.turns": 3})
    harness = PacedHarness(config.harness)
    plans = [
        harness.launch(
            base_url=f"http://h/x/q00000{q}-{m}-0",
            key="k",
            instruction="",
            workspace=tmp_path,
            home=tmp_path,
            model="m",
        ).stdin
        for q, m in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    turns = [json.loads(plan)["turns"] for plan in plans]
    assert turns[0] == turns[3] and turns[0] not in (turns[1], turns[2]) and turns[1] != turns[2] and len(turns[0]) == 3
    assert cost_model(config.paced) == load_workload("qwen3.8-2.4t").cost
    changed = paced_config("qwen3.8-2.4t", "elastic", tmp_path, speed=1.0, change={"cost.commit_s": 7.0})
    assert cost_model(changed.paced).commit_s == 7.0
    (task, *_) = PacedTasks(config.tasks).tasks("train")
    assert task.deadlines.agent_s == pytest.approx((6.0 * 3600 + 30) / 100)


def test_wrong_settings_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"paced\.speed"):
        pace_of(PacedConfig(speed=-1.0))
    with pytest.raises(ConfigError, match=r"harness\.options"):
        PacedHarness(build({"harness": {"kind": "paced", "options": {"sped": 3}}}).harness)
    with pytest.raises(ConfigError, match=r"paced\.cost"):
        cost_model(PacedConfig(cost={"decode": 1.0}))
    with pytest.raises(ConfigError, match="no-such-workload"):
        paced_config("no-such-workload", "elastic", tmp_path, speed=1.0)
