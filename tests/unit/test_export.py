"""Export: what is written is the record, token by token, in every format."""

from __future__ import annotations

import builtins
import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from opengyre.cli import main
from opengyre.errors import ConfigError
from opengyre.export.sample import FIELDS, MESSAGE_FIELDS, SCHEMA, SPAN_FIELDS
from opengyre.export.source import EVERY_LEAF, Choice, Counted, Source
from opengyre.export.trainers import SLIME_FIELDS, VERL_FIELDS
from opengyre.export.write import FORMATS, open_writer
from opengyre.record.store import Store
from opengyre.record.tree import Tree
from opengyre.record.types import Role
from record_making import Talk
from tree_making import MAIN, SUB, grow, words


def talk(seed: int) -> Talk:
    """Main line, two sub-agents, a compaction, a retry nobody saw."""
    rng, made = random.Random(seed), Talk()
    history = grow(made, rng, [words(rng, 90), words(rng, 20)], 5, asked_tail="Fix the test", **MAIN)
    for _ in range(2):
        grow(made, rng, [words(rng, 30), words(rng, 8)], 2, asked_tail="Find callers", **SUB)
    made.say([*history, words(rng, 4)], words(rng, 24), **{**MAIN, "asked_tail": "Summarize the conversation so far"})
    grow(made, rng, [words(rng, 90), words(rng, 24)], 2, asked_tail="Go on", **MAIN)
    made.say(history, words(rng, 10), delivered=False, **MAIN)
    return made


REWARDS = {"e0": 1.0, "e1": 0.0, "e2": None, "e3": 0.5}


@pytest.fixture
def record(tmp_path: Path) -> tuple[Path, dict[str, Talk]]:
    """A folder with four executions of one query, one of them without a reward, and one that still runs."""
    talks = {name: talk(seed) for seed, name in enumerate([*REWARDS, "open"])}
    with Store.open(tmp_path / "calls.db") as store:
        for name, made in talks.items():
            store.begin_execution(name, {"split": "train", "query_id": "q", "task_id": "t"})
            for call in made.made:
                messages = [{"role": "user", "parts": [{"text": "x"}]}, {"role": "assistant", "parts": [{"text": "y"}]}]
                store.put(name, call, messages)
            if name in REWARDS:
                outcome = "finished" if REWARDS[name] is not None else "evaluator_failed"
                store.finish_execution(
                    name, {"outcome": outcome, "reward": REWARDS[name], "query_id": "q", "task_id": "t"}
                )
    return tmp_path, talks


def export(folder: Path, kind: str, *more: str) -> Path:
    path = folder / f"out.{kind}"
    assert main(["export", str(folder), "--format", kind, "--out", str(path), *more]) == 0
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix in (".jsonl", ".slime"):
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pq.read_table(path).to_pylist()


def whole(row: dict[str, Any]) -> tuple[list[int], list[int], list[float | None]]:
    """(ids, mask, log-probabilities) of the whole path, whatever the format."""
    if "input_ids" in row:
        return row["input_ids"], row["loss_mask"], row["logprobs"]
    ids = row["tokens"] if "tokens" in row else row["prompts"] + row["responses"]
    mask = row["loss_mask"] if "tokens" in row else row["response_mask"]
    head = len(ids) - len(mask)
    return ids, [0] * head + mask, [None] * head + row["rollout_log_probs"]


def named(row: dict[str, Any]) -> tuple[str, int]:
    sample_id = row.get("sample_id") or (row.get("metadata") or row.get("extra_info"))["sample_id"]
    execution, _, leaf = sample_id.rpartition("/")
    return execution, int(leaf)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("select", ["j_max", "all"])
def test_a_file_read_back_is_the_record_token_by_token_and_trains_each_once(record, kind, select):
    folder, talks = record
    trained: dict[str, Counter[tuple[int, int]]] = {}
    rows = rows_of(export(folder, kind, "--select", select))
    for row in rows:
        execution, leaf = named(row)
        tree: Tree = talks[execution].tree
        path = tree.rebuild(leaf)
        ids, mask, logprobs = whole(row)
        assert ids == path.ids.tolist() and len(mask) == len(logprobs) == len(ids)
        assert all(path.trainable[i] for i, m in enumerate(mask) if m)
        for at, known in enumerate(path.logprobs.tolist()):
            if mask[at]:
                assert logprobs[at] == known
            elif "input_ids" in row:
                assert logprobs[at] == known or (logprobs[at] is None and np.isnan(known))
        places = [(node, offset) for node, start, stop, _ in tree.path(leaf) for offset in range(start, stop)]
        trained.setdefault(execution, Counter()).update(p for p, m in zip(places, mask, strict=True) if m)
    assert set(trained) == {"e0", "e1", "e3"} and all(set(c.values()) == {1} for c in trained.values())
    if select == "all":
        for execution, counts in trained.items():
            tree = talks[execution].tree
            leaves = [tree.rebuild(leaf) for leaf in tree.leaves()]
            every = {(n, o) for leaf in tree.leaves() for n, a, b, s in tree.path(leaf) if s.sampled and s.trainable
                     for o in range(a, b)}  # fmt: skip
            assert set(counts) == every and leaves


def test_rows_say_where_every_token_came_from(record):
    folder, talks = record
    for row in rows_of(export(folder, "jsonl")):
        tree = talks[row["execution_id"]].tree
        path = tree.rebuild(named(row)[1])
        spans, at = row["spans"], 0
        for span in spans:
            assert span["start"] == at and span["stop"] > at
            at = span["stop"]
            part = slice(span["start"], span["stop"])
            assert set(path.sampled[part]) == {span["sampled"]}
            assert set(path.versions[part]) == {-1 if span["version"] is None else span["version"]}
            assert span["cell"] == ("cell-0" if span["sampled"] else None)
            assert span["call_id"] in {c.meta.call_id for c in tree.calls()}
        assert at == len(row["input_ids"])
        assert row["schema"] == SCHEMA and row["query_id"] == "q" and row["task_id"] == "t"
        assert row["oldest_version"] <= row["newest_version"]


def test_advantages_are_of_the_group_and_weights_of_the_execution(record):
    folder, _ = record
    rows = rows_of(export(folder, "jsonl", "--unscored"))
    advantage = {r["execution_id"]: r["advantage"] for r in rows}
    assert advantage["e2"] is None and advantage["e3"] == pytest.approx(0.0)
    assert advantage["e0"] == pytest.approx(-advantage["e1"]) and advantage["e0"] > 1
    for execution in advantage:
        own = [r for r in rows if r["execution_id"] == execution]
        assert sum(r["weight"] * sum(r["loss_mask"]) for r in own) == pytest.approx(1.0)


def test_filters_choose_executions_and_leaves(record):
    folder, _ = record
    assert {r["execution_id"] for r in rows_of(export(folder, "jsonl", "--min-reward", "0.5"))} == {"e0", "e3"}
    assert {r["execution_id"] for r in rows_of(export(folder, "jsonl", "--execution", "e1"))} == {"e1"}
    rows = rows_of(export(folder, "jsonl", "--role", "sub_agent", "--select", "all"))
    assert {r["role"] for r in rows} == {"sub_agent"} and len(rows) == 6
    assert len(rows_of(export(folder, "jsonl", "--j-max", "1"))) == 3
    (row, *_) = rows_of(export(folder, "jsonl", "--messages"))
    assert {m["role"] for m in row["messages"]} == {"user", "assistant"} and row["messages"][0]["content"] == "x"


def test_the_same_seed_exports_the_same_file(record):
    folder, _ = record
    first = export(folder, "jsonl", "--seed", "3").read_bytes()
    assert export(folder, "jsonl", "--seed", "3").read_bytes() == first


def test_verl_and_slime_rows_have_the_fields_their_loaders_read(record):
    folder, _ = record
    for row in rows_of(export(folder, "verl")):
        assert set(row) == {f.name for f in VERL_FIELDS}
        assert len(row["responses"]) == len(row["response_mask"]) == len(row["rollout_log_probs"])
        assert row["rm_scores"][-1] == row["reward_score"] and not any(row["rm_scores"][:-1])
        assert row["response_mask"][0] == 1 and row["prompts"]
    rows = rows_of(export(folder, "slime", "--unscored"))
    assert [r["index"] for r in rows] == list(range(len(rows))) and {r["group_index"] for r in rows} == {0}
    for row in rows:
        assert set(row) == {f.name for f in SLIME_FIELDS}
        assert len(row["loss_mask"]) == len(row["rollout_log_probs"]) == row["response_length"]
        assert row["remove_sample"] == (row["reward"] is None)
        assert row["status"] == ("failed" if row["reward"] is None else "completed") and row["weight_versions"]


@pytest.mark.parametrize("kind", ["jsonl", "slime"])
def test_json_lines_load_with_datasets(record, kind, tmp_path):
    datasets = pytest.importorskip("datasets")
    path = export(record[0], kind, "--messages", "--unscored")
    loaded = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert [r["sample_id"] if kind == "jsonl" else r["index"] for r in loaded] == [
        r["sample_id"] if kind == "jsonl" else r["index"] for r in rows_of(path)
    ]
    name = "input_ids" if kind == "jsonl" else "tokens"
    assert [r[name] for r in loaded] == [r[name] for r in rows_of(path)]


@pytest.mark.parametrize("kind", ["parquet", "verl"])
def test_parquet_loads_with_datasets(record, kind, tmp_path):
    datasets = pytest.importorskip("datasets")
    path = export(record[0], kind)
    loaded = datasets.load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded.to_list() == rows_of(path)
    assert pq.read_schema(path).metadata[b"opengyre.schema"].decode() == SCHEMA


def test_a_long_execution_is_written_path_by_path(tmp_path):
    """Memory: the tree, one path and its row; not all paths, not all rows."""
    made, rng = Talk(), random.Random(0)
    history = [words(rng, 200_000)]
    for branch in range(12):
        made.say([*history, words(rng, 50 + branch)], words(rng, 100), **MAIN)
    with Store.open(tmp_path / "calls.db") as store:
        store.begin_execution("e", {})
        for call in made.made:
            store.put("e", call)
        store.finish_execution("e", {"outcome": "finished", "reward": 1.0})
    peaks = {}
    for j_max in (1, EVERY_LEAF):
        with Source(tmp_path) as source, open_writer(tmp_path / "out.jsonl", "jsonl") as writer:
            tracemalloc.start()
            for sample in source.samples(Choice(j_max=j_max)):
                writer.write(sample)
            peaks[j_max] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peaks[EVERY_LEAF] < 1.6 * peaks[1], peaks


def test_what_fails_leaves_no_file(record, tmp_path):
    folder, _ = record
    for kind in FORMATS:
        path = tmp_path / f"half.{kind}"
        path.write_text("before")
        with pytest.raises(RuntimeError), Source(folder) as source, open_writer(path, kind) as writer:
            for sample in source.samples(Choice()):
                writer.write(sample)
                raise RuntimeError("the disk is gone")
        assert path.read_text() == "before" and not list(tmp_path.glob(".half*"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--execution", "nobody"], ("--execution", "nobody")),
        (["--min-reward", "2"], ("no execution is left", "3 below 2.0", "1 without a reward")),
        (["--split", "held_out"], ("no execution is left", "of the train split")),
        (["--select", "all", "--j-max", "2"], ("--j-max", "one of the two")),
        (["--out", "/nowhere/x.jsonl"], ("--out", "/nowhere is no folder")),
        (["--role", "main_summary", "--execution", "e9"], ("--execution", "e9")),
    ],
)
def test_errors_name_the_option(record, capsys, argv, says):
    assert main(["export", str(record[0]), "--format", "jsonl", *argv]) in (1, 2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(words_ in err for words_ in says), err


def test_folders_with_nothing_to_export(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        Source(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no recorded calls"):
        Source(tmp_path)
    with Store.open(tmp_path / "calls.db") as store, Source(tmp_path) as source:
        with pytest.raises(ConfigError, match="no execution was recorded"):
            list(source.samples(Choice()))
        store.begin_execution("e", {})
        with pytest.raises(ConfigError, match="none of 1 executions is finished"):
            list(source.samples(Choice()))


def test_without_pyarrow_parquet_names_the_extra(record, monkeypatch):
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    for kind in ("parquet", "verl"):
        with pytest.raises(ConfigError, match=r"opengyre\[export\]"), open_writer(record[0] / "x", kind):
            pass
    with open_writer(record[0] / "x", "jsonl"):
        pass


def test_counts_say_what_was_left_out(record):
    counted = Counted()
    with Source(record[0]) as source:
        made = list(source.samples(Choice(roles=(Role.MAIN,)), counted))
    assert counted.executions == 3 and counted.samples == len(made)
    assert counted.trained == sum(s.sample.tokens for s in made)
    assert counted.left_out["not finished"] == 1 and counted.left_out["without a reward"] == 1


def test_the_documentation_lists_every_column():
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    for field in (*FIELDS, *SPAN_FIELDS, *MESSAGE_FIELDS, *VERL_FIELDS, *SLIME_FIELDS):
        kind = f"{field.type}[{field.shape}]" if field.shape else field.type
        assert f"| `{field.name}` | {kind} | {field.meaning} |" in text, field
