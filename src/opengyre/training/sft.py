"""Supervised fine-tuning on recorded executions: ``opengyre sft RUN…``.

    run folders ─▶ Recorded (samples/recorded.py) ─▶ for training | held out
                                │
       each epoch: random order ─▶ batch ─▶ trainer.micro_step ─▶ commit at the schedule's rate ─▶ …
                                                                        │ epoch over
                     OUT.partial/checkpoints/version-N ◀── durable ─────┤
                                                                        ▼
                     OUT: a Hugging Face folder, renamed into place ◀── all epochs over

It is the trainer of reinforcement learning with a plain policy gradient at advantage 1, which is the cross-entropy of
the sampled tokens: trees are packed, prefixes shared and gradients summed by the same code. A killed run goes on after
its last whole epoch; order and batches depend on the seed alone.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from opengyre.config import TrainConfig
from opengyre.errors import ConfigError, TrainingError
from opengyre.rollout.torch_model import load_model
from opengyre.samples.recorded import Keep, Recorded, batches, read_recorded, split_off
from opengyre.training import folders
from opengyre.training.torch_trainer import TorchTrainer

PARTIAL = ".partial"  # beside OUT: checkpoints of epochs, and what they belong to
PLAN = "plan.json"
TRAINER_FILES = ("optimizer.pt", "state.json")  # of a checkpoint; OUT is a plain model folder
SAY_EVERY_S = 5.0  # progress lines
SMOOTH = 20  # steps whose mean loss a progress line shows
Say = Callable[[str], None]


class SftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One fine-tuning. Rates and epochs fit a large model; a small one takes a hundred times the rate."""

    epochs: int = 1
    learning_rate: float = 1e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.05  # share of the steps during which the rate rises from 0
    batch_tokens: int = 16_384  # sampled tokens of one optimizer step
    micro_step_tokens: int = 8192  # tokens whose activations are held at once
    weight_decay: float = 0.0
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    held_out: float = 0.05  # share of the tasks whose loss is measured, not trained
    seed: int = 0
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    keep: Keep = Keep()


class SftResult(msgspec.Struct, frozen=True):
    """Mean loss per sampled token in nats, weighted as trained; NaN where nothing was held out."""

    executions: int
    held_out_executions: int
    steps: int
    loss: float
    held_out_before: float
    held_out_after: float


def fine_tune(sources: Sequence[Path], model_dir: Path, out: Path, config: SftConfig, say: Say) -> SftResult:
    """Train the model of ``model_dir`` on what ``sources`` recorded; ``out`` appears whole, at the end.

    Raises:
        ConfigError: a source without usable executions, an ``out`` that exists, or a partial one of other settings.
        TrainingError: the data does not fit the model, a loss that is not finite, or a full disk.
    """
    if out.exists():
        raise ConfigError("exists already", where=f"--out {out}", right="a new folder")
    recorded = read_recorded(sources, config.keep, seed=config.seed)
    train, held_out = split_off(recorded, config.held_out, config.seed)
    work = out.with_name(out.name + PARTIAL)
    _claim(work, sources, model_dir, config)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    model: Any = load_model(model_dir, device, getattr(torch, config.dtype))
    _check_ids(recorded, model.get_input_embeddings().weight.shape[0])
    trainer = TorchTrainer(model, _train_config(config), seed=config.seed, tokenizer_from=model_dir)
    sft = Sft(trainer, train, held_out, config, say)
    tokens = sum(r.tokens for r in train)
    say(
        f"{len(train)} executions, {tokens} sampled tokens, {len(held_out)} executions held out;"
        f" {sft.steps} steps in {config.epochs} epochs; loss of whoever sampled them {own_loss(recorded, config):.4f}"
    )
    result = sft.run(work)
    _publish(trainer, work, out)
    return result


class Sft:
    """The loop over epochs. ``steps`` is how many optimizer steps there are in all."""

    def __init__(
        self,
        trainer: TorchTrainer,
        train: Sequence[Recorded],
        held_out: Sequence[Recorded],
        config: SftConfig,
        say: Say,
    ) -> None:
        self._trainer, self._held_out, self._config, self._say = trainer, held_out, config, say
        seed, tokens = config.seed, config.batch_tokens
        self._plan = [list(batches(train, tokens, Random(f"{seed}/{e}"))) for e in range(config.epochs)]
        self._train = train
        self._done = 0
        self._losses: list[float] = []
        self.steps = sum(map(len, self._plan))

    def run(self, work: Path) -> SftResult:
        """All epochs that are not done; each is durable in ``work`` when the next begins."""
        before = self.held_out_loss()
        self._note("before", before)
        first = self._resume(work)
        self._started, self._begun_at = time.monotonic(), self._done
        for epoch in range(first, self._config.epochs):
            self._epoch(self._plan[epoch])
            folder = folders.folder_of(work, epoch + 1)
            self._trainer.save(folder)
            folders.prune(work, 1)
            after = self.held_out_loss()
            self._note(f"epoch {epoch + 1}/{self._config.epochs}", after)
        recent = self._losses[-SMOOTH:]
        return SftResult(
            executions=len(self._train),
            held_out_executions=len(self._held_out),
            steps=self.steps,
            loss=sum(recent) / len(recent) if recent else math.nan,
            held_out_before=before,
            held_out_after=self.held_out_loss() if first >= self._config.epochs else after,
        )

    def held_out_loss(self) -> float:
        """Mean loss of the executions held out, in nats per sampled token; NaN if there are none."""
        return mean_loss(self._trainer, self._held_out, self._config) if self._held_out else math.nan

    def _resume(self, work: Path) -> int:
        whole = folders.whole(work)
        if not whole:
            return 0
        epoch, folder = max(whole.items())
        self._trainer.restore(folder)
        self._done = sum(map(len, self._plan[:epoch]))
        self._say(f"going on after epoch {epoch}")
        return epoch

    def _epoch(self, plan: Sequence[Sequence[Recorded]]) -> None:
        said = time.monotonic()
        for batch in plan:
            rate = rate_at(self._done, self.steps, self._config)
            self._trainer.config = msgspec.structs.replace(self._trainer.config, learning_rate=rate)
            voices = voices_of(batch, self._config)
            stats = self._trainer.micro_step([sample for r in batch for sample in r.samples])
            self._trainer.commit(voices)
            self._losses.append(stats.loss_sum / voices)
            self._done += 1
            if time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                self._progress(rate)

    def _progress(self, rate: float) -> None:
        recent = self._losses[-SMOOTH:]
        left = (self.steps - self._done) * (time.monotonic() - self._started) / (self._done - self._begun_at)
        loss = sum(recent) / len(recent)
        self._say(f"step {self._done}/{self.steps} loss {loss:.4f} rate {rate:.2e}, {left:.0f} s left")

    def _note(self, when: str, held_out: float) -> None:
        recent = self._losses[-SMOOTH:]
        train = f"loss {sum(recent) / len(recent):.4f}, " if recent else ""
        self._say(f"{when}: {train}held-out loss {'-' if math.isnan(held_out) else f'{held_out:.4f}'}")


def voices_of(recorded: Sequence[Recorded], config: SftConfig) -> int:
    """What a summed loss is divided by: executions, or tokens."""
    return len(recorded) if config.keep.weight == "execution" else sum(r.tokens for r in recorded)


@torch.no_grad()
def mean_loss(trainer: TorchTrainer, recorded: Sequence[Recorded], config: SftConfig) -> float:
    """Loss as it is trained, without training: nats per sampled token, averaged over executions or tokens."""
    samples = [sample for r in recorded for sample in r.samples if sample.tokens]
    total = 0.0
    for packed in trainer.forward.plan(samples, config.micro_step_tokens):
        nats = -trainer.forward.logprobs(packed, config.micro_step_tokens).double().cpu().numpy()
        total += float((nats * np.asarray([s.weight for s in packed.samples])[packed.rows]).sum())
    return total / voices_of(recorded, config)


def own_loss(recorded: Sequence[Recorded], config: SftConfig) -> float:
    """The same loss of the policy that was recorded, from its own log-probabilities: what cannot be fallen below."""
    samples = [sample for r in recorded for sample in r.samples]
    total = sum(-float(s.logprobs[s.mask].astype(np.float64).sum()) * s.weight for s in samples)
    return total / voices_of(recorded, config)


def rate_at(step: int, steps: int, config: SftConfig) -> float:
    """Learning rate of the step with this number, from 0: linear warm-up, then the schedule, never quite 0."""
    warm = round(config.warmup * steps)
    if step < warm:
        return config.learning_rate * (step + 1) / (warm + 1)
    left = (steps - step) / max(1, steps - warm)  # 1 at the end of the warm-up, above 0 at the last step
    share = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1.0 - math.cos(math.pi * left))}[config.schedule]
    return config.learning_rate * share


def _train_config(config: SftConfig) -> TrainConfig:
    return TrainConfig(
        loss="reinforce",
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_eps=config.adam_eps,
        max_grad_norm=config.max_grad_norm,
        micro_step_tokens=config.micro_step_tokens,
    )


def _check_ids(recorded: Sequence[Recorded], vocabulary: int) -> None:
    """Token ids are of the tokenizer that recorded them; another model's would be nonsense."""
    largest = max(int(sample.ids.max()) for r in recorded for sample in r.samples)
    if largest >= vocabulary:
        what = f"token id {largest} in the record, {vocabulary} in the model's vocabulary"
        raise TrainingError(what, where="--model", right="the model whose tokenizer the run was recorded with")


def _claim(work: Path, sources: Sequence[Path], model_dir: Path, config: SftConfig) -> None:
    """Make the partial folder, or find it to be of the same settings."""
    told = {"sources": [str(s.absolute()) for s in sources], "model": str(model_dir.absolute())}
    plan = msgspec.json.format(msgspec.json.encode({**told, "config": config}))
    file = work / PLAN
    if file.is_file():
        if file.read_bytes() != plan:
            right = f"the settings in {file}, or remove {work}"
            raise ConfigError("was begun with other settings", where=str(work), right=right)
        return
    work.mkdir(parents=True, exist_ok=True)
    file.write_bytes(plan)


def _publish(trainer: TorchTrainer, work: Path, out: Path) -> None:
    """The last weights as a plain model folder; it appears under its name when it is whole."""
    final = work / "final"
    shutil.rmtree(final, ignore_errors=True)
    trainer.save(final)
    for name in TRAINER_FILES:
        (final / name).unlink()
    final.rename(out)
    shutil.rmtree(work, ignore_errors=True)
