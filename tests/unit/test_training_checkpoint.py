"""Checkpoints: whole or absent, and of this model."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opengyre.config import TrainConfig
from opengyre.errors import TrainingError
from opengyre.training import checkpoint, folders
from opengyre.training.torch_trainer import TorchTrainer
from training_models import random_samples, tiny_qwen3

torch.set_num_threads(1)
CONFIG = TrainConfig(clip_low=99.0, clip_high=99.0)


def trainer(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> TorchTrainer:
    return TorchTrainer(tiny_qwen3(seed, dtype, **changes), CONFIG)


def step(t: TorchTrainer, seed: int = 1) -> None:
    t.micro_step(random_samples(seed, executions=2))
    t.commit(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_resumed_equals_uninterrupted(tmp_path, dtype):
    straight, stopped = trainer(dtype=dtype), trainer(dtype=dtype)
    for each in (straight, stopped):
        step(each, 1)
        step(each, 2)
    stopped.save(tmp_path / "c")
    resumed = trainer(seed=5, dtype=dtype)
    resumed.restore(tmp_path / "c")
    assert (resumed.version, resumed.steps) == (2, 2)
    for each in (straight, resumed):
        step(each, 3)
    for name, weights in straight.weights().items():
        assert np.array_equal(weights, resumed.weights()[name]), name


def test_is_a_hugging_face_folder(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (source / name).write_text(f"{{}} {name}")
    (source / "model.safetensors").write_text("not this one")
    t = TorchTrainer(tiny_qwen3(0, torch.float32), CONFIG, tokenizer_from=source)
    step(t)
    t.save(tmp_path / "c")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c", local_files_only=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for a, b in zip(model.parameters(), t.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "c" / "chat_template.jinja").read_text() == "{} chat_template.jinja"
    names = {p.name for p in (tmp_path / "c").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "optimizer.pt", "state.json"}


def test_latest_and_prune(tmp_path):
    assert folders.whole(tmp_path) == {}
    t = trainer()
    for version in (1, 2, 10):
        t.version = version
        t.save(folders.folder_of(tmp_path, version))
    (tmp_path / "checkpoints" / "version-000011").mkdir()  # without a state: not a checkpoint
    folders.prune(tmp_path, 2)
    assert [p.name for p in folders.whole(tmp_path).values()] == ["version-000002", "version-000010"]
    folders.prune(tmp_path, 2)
    assert list(folders.whole(tmp_path)) == [2, 10]
    folders.remove_newer(tmp_path, 2)
    assert list(folders.whole(tmp_path)) == [2]
    assert not list((tmp_path / "checkpoints").glob("*.saving"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 64}, "hidden_size"),
        ({"num_hidden_layers": 3}, "layer"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),  # same tensors, another model
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}, "head_dim"),
    ],
)
def test_another_model_is_refused(tmp_path, changes, text):
    trainer().save(tmp_path / "c")
    other = trainer(**changes)
    before = {n: w.copy() for n, w in other.weights().items()}
    with pytest.raises(TrainingError, match=text):
        other.restore(tmp_path / "c")
    assert all(np.array_equal(w, before[n]) for n, w in other.weights().items())


def test_another_dtype_is_named(tmp_path):
    trainer().save(tmp_path / "c")
    with pytest.raises(TrainingError, match=r"embed_tokens.*float64.*float32"):
        trainer(dtype=torch.float32).restore(tmp_path / "c")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "config.json"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damage_is_an_error(tmp_path, name, how):
    t = trainer()
    t.save(tmp_path / "c")
    path = tmp_path / "c" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) if how == "cut" else path.unlink()
    before = {n: w.copy() for n, w in t.weights().items()}
    with pytest.raises(TrainingError, match="checkpoint"):
        t.restore(tmp_path / "c")
    assert all(np.array_equal(w, before[n]) for n, w in t.weights().items())


def test_an_existing_folder_is_never_overwritten(tmp_path):
    t = trainer()
    t.save(tmp_path / "c")
    with pytest.raises(TrainingError, match="exists"):
        t.save(tmp_path / "c")


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path):
    t = trainer(dtype=torch.float32)
    t.save(tmp_path / "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1 << 10, 1 << 14, (tmp_path / "before" / "model.safetensors").stat().st_size + 64):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(TrainingError, match="not written"):
                step(t)  # by now the optimizer state is larger than the weights
                t.save(tmp_path / "c")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [p.name for p in tmp_path.iterdir()] == ["before"]
    t.save(tmp_path / "c")


def save_and_hang(run: Path, stage: int, reached) -> None:
    """Child: one whole checkpoint, then a second that stops for good at its ``stage``-th file."""
    t = trainer()
    t.version = 1
    t.save(folders.folder_of(run, 1))
    done, real = 0, checkpoint._fsync

    def fsync(path: Path) -> None:
        nonlocal done
        done += 1
        if done == stage:
            reached.set()
            signal.pause()
        real(path)

    checkpoint._fsync = fsync
    t.save(folders.folder_of(run, 2))


@pytest.mark.parametrize("stage", [1, 4])
def test_killed_while_saving(tmp_path, stage):
    """kill -9 with the new checkpoint partly on disk: the one before loads, and the next save cleans up."""
    fork = multiprocessing.get_context("fork")
    reached = fork.Event()
    child = fork.Process(target=save_and_hang, args=(tmp_path, stage, reached))
    child.start()
    assert reached.wait(120)
    child.kill()
    child.join()
    assert len(list((tmp_path / "checkpoints").glob("*.saving"))) == 1
    found = folders.whole(tmp_path)[1]
    assert list(folders.whole(tmp_path)) == [1]
    t = trainer(seed=9)
    t.restore(found)
    assert t.version == 1
    step(t)
    t.save(folders.folder_of(tmp_path, t.version))
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["version-000001", "version-000002"]
