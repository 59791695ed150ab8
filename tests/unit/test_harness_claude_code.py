"""The command line and the environment that Claude Code is started with. What it makes of them: the client tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opengyre.config import HarnessConfig
from opengyre.errors import ConfigError
from opengyre.executions.harness.base import Launch, Limits
from opengyre.executions.harness.claude_code import ClaudeCode, Options, compaction
from opengyre.executions.harness.registry import make_harness


@pytest.fixture
def claude(tmp_path: Path) -> str:
    """A program that says it is the pinned version."""
    path = tmp_path / "claude"
    path.write_text("#!/bin/sh\necho '2.1.220 (Claude Code)'\n")
    path.chmod(0o755)
    return str(path)


def launched(limits: Limits | None = None, env: dict[str, str] | None = None, **options: object) -> Launch:
    config = HarnessConfig(kind="claude_code", options=options, env=env or {})
    return make_harness(config, limits).launch(
        base_url="http://127.0.0.1:9/x/e",
        key="secret",
        instruction="--do it",
        workspace=Path("/workspace"),
        home=Path("/home/agent"),
        model="opengyre",
    )


def test_it_is_quiet_patient_and_asks_for_one_model(claude):
    launch = launched(path=claude)
    assert launch.argv[0] == claude and launch.tools == [claude]
    assert launch.stdin == "--do it" and "--do it" not in launch.argv  # an instruction is no argument
    env = launch.env
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9/x/e"
    assert env["ANTHROPIC_AUTH_TOKEN"] == "secret" and "ANTHROPIC_API_KEY" not in env
    assert {value for name, value in env.items() if name.endswith("_MODEL")} == {"opengyre"}
    assert env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == env["DISABLE_AUTOUPDATER"] == "1"
    assert env["CLAUDE_ENABLE_STREAM_WATCHDOG"] == env["API_FORCE_IDLE_TIMEOUT"] == "0"
    assert int(env["API_TIMEOUT_MS"]) < 2**31  # more overflows its timer and fires at once
    assert env["IS_SANDBOX"] == "1" and "secret" not in " ".join(launch.argv)


def test_bare_mode_reads_another_key(claude):
    launch = launched(path=claude, bare=True, thinking=False)
    assert "--bare" in launch.argv
    assert launch.env["ANTHROPIC_API_KEY"] == "secret" and "ANTHROPIC_AUTH_TOKEN" not in launch.env
    assert launch.env["CLAUDE_CODE_DISABLE_THINKING"] == "1"


def test_options_become_arguments_and_the_users_environment_wins(claude):
    launch = launched(
        env={"API_TIMEOUT_MS": "1000"},
        path=claude,
        tools=["Bash", "Edit"],
        allowed_tools=["Bash(git *)"],
        disallowed_tools=["WebFetch"],
        permission_mode="dontAsk",
        settings={"permissions": {"deny": ["Read(./secret)"]}},
        max_turns=5,
        args=["--effort", "low"],
    )
    argv = launch.argv

    def after(flag: str) -> str:
        return argv[argv.index(flag) + 1]

    assert (after("--tools"), after("--allowedTools"), after("--disallowedTools")) == (
        "Bash,Edit",
        "Bash(git *)",
        "WebFetch",
    )
    assert after("--permission-mode") == "dontAsk" and after("--max-turns") == "5" and argv[-2:] == ["--effort", "low"]
    assert json.loads(after("--settings"))["permissions"]["deny"] == ["Read(./secret)"]
    assert launch.env["API_TIMEOUT_MS"] == "1000"


def test_what_it_is_told_of_the_context():
    def told(context: int, reply: int | None = None, **options: object) -> list[int | None]:
        env = compaction(Limits(context, reply), Options(**options))
        names = ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW")
        return [int(env[name]) if name in env else None for name in names]

    assert told(200_000) == [32_000, 200_000, 200_000]
    assert told(200_000, 4096) == [4096, 200_000, 200_000]  # the pin
    assert told(200_000, 4096, reply_tokens=2048) == [2048, 200_000, 200_000]
    assert told(200_000, compact_tokens=100_000) == [32_000, 100_000, 100_000]
    assert told(200_000, compact_tokens=0) == [32_000, None, None]
    assert told(4096) == [1024, None, None]  # it would compact before every call


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bear": True}, r"harness\.options\.bear: unknown key \(did you mean bare\?\)"),
        ({"bare": "yes"}, r"harness\.options\.bare: 'yes' \(expected `bool`"),
        ({"tools": "Bash"}, r"harness\.options\.tools: 'Bash'"),
        ({"max_turns": 0}, r"harness\.options\.max_turns: 0 \(expected `int` >= 1\)"),
        ({"reply_tokens": 0}, r"harness\.options\.reply_tokens"),
        ({"compact_tokens": -1}, r"harness\.options\.compact_tokens"),
        ({"permission_mode": "ask"}, r"harness\.options\.permission_mode: 'ask'"),
    ],
)
def test_an_option_that_is_wrong_is_named(claude, options, named):
    with pytest.raises(ConfigError, match=named):
        launched(path=claude, **options)


def test_a_command_beside_it_is_refused(claude):
    config = HarnessConfig(kind="claude_code", command=["claude"], options={"path": claude})
    with pytest.raises(ConfigError, match=r"harness\.command"):
        ClaudeCode(config, Limits(4096))
