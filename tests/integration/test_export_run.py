"""Export of a whole run and of a proxy's record: what is written is what the run trained."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

import tiny_run
from opengyre.cli import main
from opengyre.config import to_toml
from opengyre.record.store import Store


def test_a_runs_export_is_what_it_trained(tmp_path: Path):
    model = tiny_run.make_model(tmp_path / "model")
    file = tmp_path / "config.toml"
    config = tiny_run.config(tmp_path, model, eval={"every": -1}, watch={"live": "off", "report": False})
    file.write_text(to_toml(config))
    assert main(["train", str(file)]) == 0
    run = tmp_path / "run"
    assert main(["export", str(run), "--format", "parquet"]) == 0
    rows = {row["sample_id"]: row for row in pq.read_table(run / "samples.parquet").to_pylist()}
    with Store.open(run / "calls.db", readonly=True) as store:
        outcomes = [e.outcome for e in store.executions() if e.outcome is not None]
        trained = {s["sample"]: (s, o) for o in outcomes for s in o["samples"]}
        assert trained
        for name, (sample, outcome) in trained.items():
            row = rows[name]
            assert sum(row["loss_mask"]) == sample["tokens"] and row["role"] == sample["role"]
            assert row["advantage"] == outcome["advantage"] and row["reward"] == outcome["reward"]
            path = store.load_tree(row["execution_id"]).rebuild(int(name.rpartition("/")[2]))
            assert row["input_ids"] == path.ids.tolist()
            for at, known in enumerate(path.logprobs.tolist()):
                assert row["logprobs"][at] == known or not path.sampled[at]
        # a group without variance gives the run no samples; its rows have advantage 0
        for name in rows.keys() - trained.keys():
            assert rows[name]["advantage"] == 0.0
    cells = {span["cell"] for row in rows.values() for span in row["spans"] if span["sampled"]}
    assert cells <= {"core", "satellite-1", "satellite-2"} and cells
    assert main(["export", str(run), "--format", "slime"]) == 0
    lines = [json.loads(line) for line in (run / "samples.slime.jsonl").read_text().splitlines()]
    assert {line["metadata"]["sample_id"] for line in lines} == set(rows)
    groups = {line["metadata"]["query_id"]: line["group_index"] for line in lines}
    assert sorted(groups.values()) == list(range(len(groups)))
