"""Supervised fine-tuning: the loss is the plain cross-entropy of what was sampled, and a killed run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_run
from opengyre.cli import main
from opengyre.errors import ConfigError, TrainingError
from opengyre.samples.recorded import Keep, Recorded, read_recorded
from opengyre.training import sft
from opengyre.training.sft import SftConfig, fine_tune, mean_loss, rate_at
from opengyre.training.torch_trainer import TorchTrainer
from recording import VOCABULARY, record_run
from training_models import tiny_qwen3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_run(tmp_path / "run")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_run.make_model(tmp_path / "model")


def plain_loss(model: torch.nn.Module, recorded: list[Recorded], weight: str) -> torch.Tensor:
    """Each execution on its own, by the textbook."""
    nats, voices = [], 0
    for one in recorded:
        for sample in one.samples:
            ids = torch.from_numpy(sample.ids.astype("int64"))[None]
            logits = model(input_ids=ids).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            own = losses[torch.from_numpy(sample.mask[1:])].sum()
            nats.append(own / one.tokens if weight == "execution" else own)
        voices += 1 if weight == "execution" else one.tokens
    return torch.stack(nats).sum() / voices


@pytest.mark.parametrize("weight", ["execution", "token"])
def test_loss_and_gradient_are_those_of_plain_separate_sequences(run: Path, weight: str) -> None:
    config = SftConfig(keep=Keep(weight=weight), micro_step_tokens=64, learning_rate=0.0)  # type: ignore[arg-type]
    recorded = read_recorded([run], config.keep)
    model = tiny_qwen3(vocab_size=VOCABULARY)
    loss = plain_loss(model, recorded, weight)
    want = torch.autograd.grad(loss, list(model.parameters()))

    trainer = TorchTrainer(model, sft._train_config(config))
    assert mean_loss(trainer, recorded, config) == pytest.approx(float(loss.detach()), abs=1e-12)
    stats = trainer.micro_step([s for r in recorded for s in r.samples])
    voices = sft.voices_of(recorded, config)
    assert stats.loss_sum / voices == pytest.approx(float(loss.detach()), abs=1e-12)
    got = trainer.take_gradients()
    for (name, _), gradient in zip(model.named_parameters(), want, strict=True):
        assert torch.allclose(torch.from_numpy(got[name]) / voices, gradient, atol=1e-12, rtol=0), name


def test_it_learns_what_was_recorded_and_leaves_a_plain_model_folder(
    run: Path, model_dir: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    config = SftConfig(epochs=30, learning_rate=1e-2, batch_tokens=40, held_out=0.2)
    result = fine_tune([run], model_dir, tmp_path / "out", config, said.append)
    assert result.executions == 4
    assert result.held_out_executions == 1
    assert result.loss < 0.7 * math.log(VOCABULARY)
    assert not math.isnan(result.held_out_after)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not names & set(sft.TRAINER_FILES)
    assert not (tmp_path / "out.partial").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert said[0].startswith("4 executions, ")
    assert any(line.startswith("epoch 30/30: loss ") for line in said)


class _KilledError(Exception):
    """Stands for a kill."""


def test_a_killed_run_goes_on_after_its_last_whole_epoch_to_the_same_weights(
    run: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SftConfig(epochs=3, learning_rate=1e-3, batch_tokens=30)
    fine_tune([run], model_dir, tmp_path / "whole", config, lambda line: None)

    def kill(line: str) -> None:
        if line.startswith("epoch 2/3"):
            raise _KilledError

    with pytest.raises(_KilledError):
        fine_tune([run], model_dir, tmp_path / "cut", config, kill)
    assert not (tmp_path / "cut").exists()
    said: list[str] = []
    fine_tune([run], model_dir, tmp_path / "cut", config, said.append)
    assert "going on after epoch 2" in said
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


def test_a_partial_run_of_other_settings_is_not_gone_on_with(run: Path, model_dir: Path, tmp_path: Path) -> None:
    def kill(line: str) -> None:
        if line.startswith("epoch 1/2"):
            raise _KilledError

    with pytest.raises(_KilledError):
        fine_tune([run], model_dir, tmp_path / "out", SftConfig(epochs=2), kill)
    with pytest.raises(ConfigError, match="begun with other settings"):
        fine_tune([run], model_dir, tmp_path / "out", SftConfig(epochs=3), kill)


def test_a_model_of_another_vocabulary_is_refused(run: Path, model_dir: Path, tmp_path: Path) -> None:
    small = tiny_qwen3(vocab_size=20, dtype=torch.float32)
    small.save_pretrained(model_dir)
    with pytest.raises(TrainingError, match=r"token id \d+ in the record, 20 in the model's vocabulary"):
        fine_tune([run], model_dir, tmp_path / "out", SftConfig(), lambda line: None)


def test_the_loss_of_whoever_was_recorded_comes_from_the_recorded_log_probabilities(run: Path) -> None:
    recorded = read_recorded([run], Keep())
    means = [-float(s.logprobs[s.mask].astype("f8").mean()) for r in recorded for s in r.samples]
    assert sft.own_loss(recorded, SftConfig()) == pytest.approx(sum(means) / len(means))


def test_the_rate_rises_then_falls_and_is_never_0() -> None:
    config = SftConfig(learning_rate=1.0, warmup=0.1)
    rates = [rate_at(step, 100, config) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert min(rates) > 0.0
    half = SftConfig(learning_rate=1.0, warmup=0.0, schedule="linear")
    assert rate_at(50, 100, half) == pytest.approx(0.5)
    assert rate_at(99, 100, SftConfig(learning_rate=1.0, schedule="constant")) == 1.0
    assert rate_at(0, 1, config) == 1.0


def test_the_command_line_trains_and_says_where_the_model_is(
    run: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["sft", str(run), "--model", str(model_dir), "--out", str(out), "--min-reward", "0.5", "--threads", "1"]
    assert main([*words, "--lr", "1e-3", "--role", "main"]) == 0
    assert f"{out}: 1 steps on 1 executions, held-out loss" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--epochs", "0"], "--epochs: 0 (at least 1)"),
        (["--held-out", "1.5"], "--held-out: 1.5 (0 to 0.9)"),
        (["--min-reward", "7"], "no trainable execution passes"),
        (["--model", "/nowhere"], "--model /nowhere: is no folder (a Hugging Face causal-LM folder)"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it(
    run: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    assert main(["sft", str(run), "--model", str(model_dir), "--out", str(tmp_path / "o"), *words]) == 2
    assert error in capsys.readouterr().err


def test_an_existing_folder_is_never_written_over(run: Path, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        fine_tune([run], model_dir, model_dir, SftConfig(), lambda line: None)
