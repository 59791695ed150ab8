"""One execution from an empty folder to a result, with real processes and a scripted harness."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from engines import until
from executions_world import KINDS, FakeDoor, config, harness, run_once, served, task
from opengyre.config import HarnessConfig
from opengyre.errors import SandboxError
from opengyre.executions.groups import GroupRunner
from opengyre.executions.harness.command import CommandHarness
from opengyre.executions.outcome import Outcome
from opengyre.executions.runner import Runner
from opengyre.executions.sandbox import nursery
from opengyre.executions.sandbox.local import LocalSandbox
from opengyre.executions.sandbox.registry import make_sandbox
from opengyre.executions.task import Deadlines

SOLVE = 'call(); open("answer", "w").write("42")\n'
ID = "q000000-00-0"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_solved_task(kind, tmp_path):
    states = []
    async with served(FakeDoor()) as door:
        runner = Runner(config(kind), harness(SOLVE), door, tmp_path, lambda *a: states.append((a[0], a[3])))
        result = await runner.run(ID, "q000000", task(), queued_s=1.5)
    assert (result.outcome, result.reward, result.calls, result.exit_code) == (Outcome.FINISHED, 1.0, 1, 0)
    assert result.checks == {"answer": 1.0} and result.queued_s == 1.5 and not result.tampered
    assert result.boot_s > 0 and result.active_s > 0 and result.score_s > 0
    assert states == [(ID, "running"), (ID, "scoring"), (ID, "done")]
    assert door.log == [f"open {ID}", f"close {ID}", f"settled {ID}"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs"]  # nothing is left but the logs


async def test_workspaces_are_kept_if_asked(tmp_path):
    async with served(FakeDoor()) as door:
        await run_once(tmp_path, door, SOLVE, config=config(sandbox={"keep_workspaces": True}))
    assert (tmp_path / ID / "workspace" / "answer").read_text() == "42"
    assert not (tmp_path / ID / "home").exists()


def thaw_on_call(door: FakeDoor, text: str) -> None:
    """The execution's clock stands still until it makes the call ``text``: no test depends on how fast a machine is."""
    door.frozen.add(ID)

    async def answer(execution_id: str, said: str) -> str:
        if said == text:
            door.frozen.discard(execution_id)
        return "ok"

    door.answer = answer


async def test_S02_a_timed_out_agent_gets_its_score(tmp_path):
    """It is dead before the evaluator looks, its session is closed, and what it had done counts."""
    evaluator = """
import json, os, pathlib, sys
workspace = pathlib.Path(sys.argv[1])
dead = not os.path.exists("/proc/" + (workspace / "pid").read_text())
pathlib.Path(sys.argv[2]).write_text(json.dumps({"reward": float(dead and (workspace / "answer").exists())}))
"""
    door = FakeDoor()
    thaw_on_call(door, "solved")
    the_task = task(evaluator_files={"check.py": evaluator}, deadlines=Deadlines(agent_s=0.2))
    async with served(door):
        result = await run_once(
            tmp_path, door, 'open("pid", "w").write(str(os.getpid()))\n' + SOLVE + 'call("solved"); forever()', the_task
        )
    assert (result.outcome, result.reward) == (Outcome.TIMED_OUT, 1.0), result.detail
    assert result.outcome.scored and door.log == [f"open {ID}", f"close {ID}", f"settled {ID}"]


async def test_S10_time_we_hold_a_request_is_not_the_agents(tmp_path):
    """Held for several of its deadlines, the agent still finishes."""
    door = FakeDoor()
    asked = asyncio.Event()
    times = 0

    def held_s(execution_id: str) -> float:
        nonlocal times
        times += bool(door.counts[execution_id])
        if times > 3:
            asked.set()
        return FakeDoor.held_s(door, execution_id)

    door.held_s = held_s  # type: ignore[method-assign]
    door.frozen.add(ID)

    async def answer(execution_id: str, text: str) -> str:
        await asked.wait()  # the deadline has come three times
        return "ok"

    door.answer = answer
    async with served(door):
        result = await run_once(tmp_path, door, SOLVE, task(deadlines=Deadlines(agent_s=0.05)))
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0), result.detail
    assert result.held_s > 0.15


class Failing:
    """Makes sandboxes that fail as infrastructure does."""

    def __init__(self, how: str) -> None:
        self.how, self.release = how, threading.Event()

    def __call__(self, kind, execution_id, root, *, keep=False):
        if self.how == "refused":
            raise SandboxError("create container: 503", where=execution_id)
        if self.how == "crash":
            raise RuntimeError("client library")
        if self.how == "hangs":
            self.release.wait()
        sandbox = LocalSandbox(execution_id, root, keep=keep)
        if self.how == "lost" and "score" not in execution_id:

            async def run(*args, **kwargs):
                await LocalSandbox.run(sandbox, *args, **kwargs)
                raise SandboxError("node lost", where=execution_id)

            sandbox.run = run  # type: ignore[method-assign]
        return sandbox


SHORT = Deadlines(boot_s=0.1, agent_s=0.1)

# what happens: how sandboxes are made, script, changes of the task, outcome, reward
CAUSES = {
    "create sandbox: 503": (Failing("refused"), SOLVE, {}, Outcome.INFRA_ABORT, None),
    "sandbox client crashes": (Failing("crash"), SOLVE, {}, Outcome.INFRA_ABORT, None),
    "node lost in the middle": (Failing("lost"), SOLVE, {}, Outcome.INFRA_ABORT, None),
    "boot hangs": (Failing("hangs"), SOLVE, {"deadlines": SHORT}, Outcome.INFRA_ABORT, None),
    "agent removes all it owns": (
        make_sandbox,
        'call(); os.system("rm -rf $PWD $HOME $TMPDIR")',
        {},
        Outcome.FINISHED,
        0.0,
    ),
    "agent kills its parent": (make_sandbox, "call(); os.kill(os.getppid(), 9); forever()", {}, Outcome.FINISHED, 0.0),
    "agent is killed for its memory": (make_sandbox, SOLVE + "os.kill(os.getpid(), 9)", {}, Outcome.FINISHED, 1.0),
    "agent exits with an error": (make_sandbox, SOLVE + "sys.exit(3)", {}, Outcome.FINISHED, 1.0),
    "harness breaks before its first call": (
        make_sandbox,
        "raise ValueError('no config')",
        {},
        Outcome.HARNESS_FAILED,
        None,
    ),
    "harness never calls": (
        make_sandbox,
        "forever()",
        {"deadlines": Deadlines(agent_s=0.1)},
        Outcome.HARNESS_FAILED,
        None,
    ),
    "evaluator breaks": (make_sandbox, SOLVE, {"evaluator": ["false"]}, Outcome.EVALUATOR_FAILED, None),
    "evaluator is not there": (make_sandbox, SOLVE, {"evaluator": ["no-such"]}, Outcome.EVALUATOR_FAILED, None),
}


@pytest.mark.parametrize("cause", CAUSES)
async def test_S06_who_can_cause_it_decides(cause, tmp_path):
    make, script, changes, outcome, reward = CAUSES[cause]
    async with served(FakeDoor()) as door:
        result = await run_once(tmp_path, door, script, task(**changes), make=make)
    if isinstance(make, Failing):
        make.release.set()
    assert (result.outcome, result.reward) == (outcome, reward), result.detail
    assert door.open_ids == set() and list(nursery.marked(ID)) == []
    if outcome is Outcome.HARNESS_FAILED and "breaks" in cause:
        assert "no config" in result.detail


async def test_a_missing_harness_is_a_harness_failure(tmp_path):
    missing = CommandHarness(HarnessConfig(kind="command", command=["no-such-harness"]))
    async with served(FakeDoor()) as door:
        result = await Runner(config(), missing, door, tmp_path, lambda *_: None).run(ID, "q", task())
    assert result.outcome is Outcome.HARNESS_FAILED and "no-such-harness" in result.detail


@pytest.mark.parametrize("phase", ["harness", "evaluator"])
async def test_cancelled_means_dead_and_clean(phase, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    tell = f"open({str(gate)!r}, 'w').write('x')\n"
    script = SOLVE + (tell + "forever()" if phase == "harness" else "")
    the_task = task(evaluator_files={"check.py": tell + "while True: pass"})
    async with served(FakeDoor()) as door:
        running = asyncio.create_task(run_once(tmp_path / "root", door, script, the_task))
        await asyncio.to_thread(gate.read_text)
        running.cancel()
        result = await running
    assert result.outcome is Outcome.CANCELLED and door.open_ids == set()
    assert list(nursery.marked(ID)) == list(nursery.marked(f"{ID}-score-0")) == []
    assert [p.name for p in (tmp_path / "root").iterdir()] == ["logs"]


@pytest.mark.parametrize("kind", KINDS)
async def test_O03_sixteen_at_once_share_no_home(kind, tmp_path):
    """All sixteen are at work at the same time; each keeps state in its home as real harnesses do."""
    door, everyone = FakeDoor(), asyncio.Event()

    async def answer(execution_id: str, text: str) -> str:
        if len(door.counts) == 16:
            everyone.set()
        await everyone.wait()
        return "ok"

    door.answer = answer
    script = """
for variable in ("HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "TMPDIR"):
    path = os.environ[variable] + "/.state.json"
    assert not os.path.exists(path), path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    call() if variable == "HOME" else None
    for n in range(20):
        state = json.load(open(path)) if n else []
        json.dump(state + [os.getpid()], open(path, "w"))
    assert json.load(open(path)) == [os.getpid()] * 20
open("answer", "w").write("42")
"""
    async with served(door):
        runner = Runner(config(kind), harness(script), door, tmp_path, lambda *_: None)
        groups = GroupRunner(runner.run, group_size=16, infra_retries=0, limit=16)
        groups.submit(0, task())
        query, results = await groups.next_complete()
        await groups.close()
    assert [r.execution_id for r in results] == [f"{query}-{m:02d}-0" for m in range(16)]
    assert [r.reward for r in results] == [1.0] * 16, [r.detail for r in results]
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]


async def test_a_folder_that_cannot_be_removed_is_abandoned_and_reported(tmp_path):
    class Stuck(LocalSandbox):
        async def close(self, timeout_s: float) -> None:
            if "score" in self.folder.name:
                return await super().close(timeout_s)
            raise SandboxError("abandoned: not removed within 0.1 s", where=self.folder.name)

    async with served(FakeDoor()) as door:
        result = await run_once(
            tmp_path, door, SOLVE, make=lambda kind, name, root, *, keep=False: Stuck(name, root, keep=keep)
        )
    assert result.reward == 1.0 and "abandoned" in result.detail


async def test_a_result_waits_for_the_calls_that_were_stopped(tmp_path):
    """What was said in an execution is final when its result is there, the calls its deadline cut included."""
    async with served(FakeDoor()) as door:
        recorded = asyncio.Event()

        async def settled(execution_id: str) -> None:
            await recorded.wait()

        door.settled = settled
        states = []
        runner = Runner(config(KINDS[0]), harness(SOLVE), door, tmp_path, lambda *a: states.append(a[3]))
        running = asyncio.create_task(runner.run(ID, "q000000", task()))
        await until(lambda: f"close {ID}" in door.log and "scoring" in states)
        assert not running.done() and "done" not in states
        recorded.set()
        assert (await running).outcome is Outcome.FINISHED and states[-1] == "done"
