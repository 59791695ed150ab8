"""What the adapters of opencode, Codex, Qwen Code and mini-swe-agent write into a home, and their options."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from opengyre.config import HarnessConfig
from opengyre.errors import ConfigError
from opengyre.executions.harness.base import Launch, Limits
from opengyre.executions.harness.install import PINNED
from opengyre.executions.harness.registry import make_harness
from opengyre.executions.options import merged
from opengyre.executions.sandbox.local import LocalSandbox

KINDS = ("opencode", "codex", "qwen_code", "mini_swe_agent")
URL = "http://127.0.0.1:9/x/q000000-00-0"


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Launches a kind whose program only says its version."""
    node = tmp_path / "node"
    node.write_text("#!/bin/sh\n")
    node.chmod(0o755)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **at: str(node) if name == "node" else which(name, **at))

    def launch(kind: str, context: int = 100_000, reply: int | None = None, **options: Any) -> Launch:
        name = "python" if kind == "mini_swe_agent" else kind  # it is asked for its version through its Python
        program = tmp_path / kind / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\necho {PINNED[kind].version}\n")
        program.chmod(0o755)
        config = HarnessConfig(kind=kind, options={"path": str(program), **options}, env={"MINE": "1"})
        return make_harness(config, Limits(context, reply)).launch(
            base_url=URL,
            key="secret",
            instruction="--do it",
            workspace=Path("/workspace"),
            home=Path("/home/agent"),
            model="policy",
        )

    return launch


@pytest.mark.parametrize("kind", KINDS)
def test_base_url_key_and_instruction_reach_it(launched, kind):
    launch = launched(kind)
    everything = " ".join([*launch.argv, *launch.env.values(), *launch.files.values()])
    assert f"{URL}/v1" in everything and "secret" in launch.env.values() and launch.env["MINE"] == "1"
    assert "secret" not in " ".join([*launch.argv, *launch.files.values()])
    assert "--do it" in (launch.stdin or " ".join(launch.files.values())) and "--do it" not in launch.argv
    assert launch.files and not any(Path(name).is_absolute() for name in launch.files)


def test_opencode_is_told_of_the_context_and_waits_for_ever(launched):
    launch = launched(
        "opencode", 40_000, dialect="messages", settings={"provider": {"mine": {}}, "tools": {"task": False}}
    )
    settings = json.loads(launch.files[".config/opencode/opencode.json"])
    ours = settings["provider"]["opengyre"]
    assert settings["provider"]["mine"] == {} and settings["tools"] == {"task": False}
    assert ours["npm"] == "@ai-sdk/anthropic" and ours["options"]["timeout"] is ours["options"]["chunkTimeout"] is False
    assert ours["models"]["policy"]["limit"] == {"context": 40_000, "output": 10_000}
    assert (settings["autoupdate"], settings["share"]) == (False, "disabled")


def test_codex_compacts_before_the_context_ends(launched):
    launch = launched("codex", 40_000, settings={"model_providers": {"x": {"name": "X"}}})
    settings = tomllib.loads(launch.files[".codex/config.toml"])
    assert (settings["model_context_window"], settings["model_auto_compact_token_limit"]) == (40_000, 30_000)
    providers = settings["model_providers"]
    assert providers["opengyre"]["wire_api"] == "responses" and providers["x"] == {"name": "X"}
    assert providers["opengyre"]["supports_websockets"] is False
    assert settings["web_search"] == "disabled" and settings["analytics"] == {"enabled": False}


def test_qwen_code_is_told_of_the_context_and_the_longest_reply(launched):
    launch = launched("qwen_code", 40_000, reply=500, compact_share=0.5)
    model = json.loads(launch.files[".qwen/settings.json"])["model"]
    assert model["generationConfig"]["contextWindowSize"] == 40_000
    assert model["chatCompression"] == {"contextPercentageThreshold": 0.5}
    assert launch.env["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "500"


def test_mini_swe_agent_reads_its_task_from_its_settings(launched):
    launch = launched("mini_swe_agent", reply=500, settings={"agent": {"step_limit": 5}})
    settings = json.loads(launch.files[".config/mini-swe-agent/opengyre.yaml"])
    assert settings["run"] == {"task": "--do it"} and settings["agent"] == {"step_limit": 5}
    assert settings["model"]["model_name"] == "openai/policy" and settings["model"]["model_kwargs"]["max_tokens"] == 500


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_are_none_are_named(launched, kind):
    with pytest.raises(ConfigError, match=r"harness\.options\.setting: .*did you mean settings"):
        launched(kind, setting={})
    with pytest.raises(ConfigError, match=r"harness\.command"):
        make_harness(HarnessConfig(kind=kind, command=["x"]))


def test_settings_are_merged_key_by_key():
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "e": 5}) == {"a": {"b": 1, "c": 4}, "d": 3, "e": 5}


def test_the_files_of_a_launch_lie_in_the_home(tmp_path):
    sandbox = LocalSandbox("x", tmp_path)
    sandbox.command(Launch(["true"], {}, files={".config/a/b.json": "{}"}), tmp_path / "log")
    assert (sandbox.home / ".config/a/b.json").read_text() == "{}"
