"""A whole run small enough for a test: a random policy, a three-call harness, tasks scored by what was written."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import policies
from opengyre.config import RunConfig, build

# Three calls that continue each other; the harness writes what the policy said. It knows a base URL and a key, no more.
HARNESS = """
import json, os, sys, urllib.request
task = sys.stdin.read()
messages = [{"role": "user", "content": task}]
said = []
for turn in range(3):
    body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 200, "messages": messages}
    request = urllib.request.Request(
        os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"]},
    )
    reply = json.load(urllib.request.urlopen(request))
    said.append("".join(block.get("text", "") for block in reply["content"]))
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "go on"}]
open("out.txt", "w").write("\\n".join(said))
"""

# Rewards differ within a group, whatever a random policy says.
EVALUATOR = """
import json, pathlib, sys
said = pathlib.Path(sys.argv[1], "out.txt")
reward = len(said.read_bytes()) % 3 / 2 if said.exists() else 0.0
pathlib.Path(sys.argv[2]).write_text(json.dumps({"reward": reward, "checks": {}}))
"""


def make_model(
    folder: Path, *, hidden_size: int = 32, layers: int = 2, context: int = 2048, tokenizer: Any = None
) -> Path:
    """A random Qwen3 with a real tokenizer (``policies.tokenizer`` if none is given) and chat template."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizer or policies.tokenizer()
    torch.manual_seed(0)
    end = tokenizer.token_to_id("<|im_end|>")
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=end,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(policies.CHATML)
    return folder


def make_tasks(folder: Path, *, train: int = 6, held_out: int = 2) -> Path:
    """Tasks that differ in their instruction only."""
    for split, number in (("train", train), ("held_out", held_out)):
        for n in range(number):
            task = folder / split / f"{split}-{n}"
            (task / "evaluator").mkdir(parents=True)
            (task / "evaluator" / "check.py").write_text(EVALUATOR)
            (task / "instruction.md").write_text(f"say something about {split} {n}")
            evaluator = [sys.executable, "{task}/check.py", "{workspace}", "{reward}"]
            (task / "task.toml").write_text(f"evaluator = {json.dumps(evaluator)}\n[deadlines]\nagent_s = 60.0\n")
    return folder


def config(tmp_path: Path, model: Path, **tables: dict[str, Any]) -> RunConfig:
    """A run of two steps with one core and two satellites; ``tables`` override single keys."""
    harness = tmp_path / "harness.py"
    harness.write_text(textwrap.dedent(HARNESS))
    tasks = tmp_path / "tasks"
    if not tasks.exists():
        make_tasks(tasks)
    data: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "steps": 2,
        "model": {"path": str(model), "context": 1024},
        "tasks": {"kind": "folder", "path": str(tasks)},
        "harness": {"kind": "command", "command": [sys.executable, "-I", str(harness)]},
        "sandbox": {"kind": "local"},
        "cells": {"satellites": 2, "slots": 4, "max_batch": 4, "kv_tokens": 8192},
        "schedule": {"cooldown_s": 0.0},
        "sampling": {"max_tokens": 12},
        "samples": {"group_size": 4, "queries_per_step": 2},
        "train": {"micro_step_tokens": 512, "clip_low": 0.2, "clip_high": 0.2},
        "eval": {"executions": 1},
        "watch": {"live": "off"},
    }
    for name, table in tables.items():
        if isinstance(table, dict):
            data[name] = {**data.get(name, {}), **table}
        else:
            data[name] = table
    return build(data)
