"""The reference trainer: one full replica of a Hugging Face causal LM, in one process.

    micro_step(samples) ─▶ packs ─▶ log-probs ─▶ loss sum ─▶ backward ─▶ ┐
    add_gradients(from a satellite) ───────────────────────────────────▶ sums (one flat tensor)
                                                                         │
      core: commit ── x 1/E, clip, AdamW, version + 1 ◀──────────────────┤
      satellite: take_gradients ── the flat tensor, handed over ◀────────┤
      leaving the training role: release ── memory to the engine ◀───────┘

Gradient sums live in one flat tensor; each parameter's gradient is a view of it, so that taking, adding, zeroing and
checking them are single operations. The tensor exists only while there are sums. The same model object may serve
rollouts when this trainer is not at work. Models in 16 bits sum in float32 and the core steps float32 masters.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opengyre.config import TrainConfig
from opengyre.errors import ConfigError, TrainingError
from opengyre.samples.types import Sample
from opengyre.training import checkpoint
from opengyre.training.base import MicroStats, StepStats
from opengyre.training.forward import Forward
from opengyre.training.loss import Loss, LossConfig, policy_loss
from opengyre.training.pack import Pack
from opengyre.training.tensors import to_numpy, to_tensor


class TorchTrainer:
    """Implements ``training.base.Trainer``.

    Args:
        model: a Hugging Face causal LM; put into eval mode for good (dropout would make the ratio noise).
        config: the run's ``train`` table.
        seed: of the try-outs in ``Forward``; nothing else in a training step is random.
        core: this replica owns the optimizer; satellites have none.
        version: weights version the model holds.
        temperature: the sampling temperature the behaviour log-probabilities were recorded at.
        reference: frozen model for ``config.kl_weight``.
        tokenizer_from: folder whose tokenizer files go into checkpoints; default: where the model was loaded from.
    """

    def __init__(
        self,
        model: Any,
        config: TrainConfig,
        *,
        seed: int = 0,
        core: bool = True,
        version: int = 0,
        temperature: float = 1.0,
        reference: Any | None = None,
        tokenizer_from: Path | None = None,
    ) -> None:
        if config.kl_weight and reference is None:
            raise ConfigError(f"{config.kl_weight} without a reference model", where="train.kl_weight", right="0")
        self.model, self.config, self.version, self.steps = model.eval(), config, version, 0
        self.forward = Forward(model, temperature=temperature, seed=seed)
        self._reference = None if reference is None else Forward(reference.eval(), temperature=temperature, seed=seed)
        self._tokenizer_from = Path(model.name_or_path) if tokenizer_from is None else tokenizer_from
        self._loss_config = LossConfig(
            kind=config.loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            tis_cap=config.tis_cap if config.old_logprobs == "decoupled" else None,
            kl_weight=config.kl_weight,
        )
        self._parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())  # tied ones once
        dtypes = {p.dtype for p in self._parameters.values()}
        self._sum_dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._sums: Tensor | None = None
        self._masters: dict[str, Tensor] = {}
        self._optimizer: torch.optim.Optimizer | None = self._make_optimizer() if core else None

    # --- gradients ------------------------------------------------------------------------------------------------

    def micro_step(self, samples: Sequence[Sample]) -> MicroStats:
        """Forward and backward over ``samples``; adds to the local gradient sums.

        Any number of tokens is taken, ``micro_step_tokens`` of activations at a time. Samples without a trainable token
        cost nothing; with no other ones all figures are 0.

        Raises:
            TrainingError: a loss or gradient is not finite, naming it. The local sums are dropped then, since they hold
                the broken one: what was claimed and not handed over has to be done again.
        """
        started = time.perf_counter()
        useful = [s for s in samples if s.tokens]
        packs = self.forward.plan(useful, self.config.micro_step_tokens, self.config.row_tokens)
        stats = _Sums()
        for packed in packs:
            loss = self._backward(packed, stats)
            stats.forward_tokens += self.forward.cost(packed)
            stats.clipped += loss.clipped
            stats.ratio_sum += float(loss.ratios.sum())
            stats.ratio_max = max(stats.ratio_max, float(loss.ratios.max()))
        if packs:
            self._refuse_non_finite(self._require_sums(), "gradient of this micro-step")
        return MicroStats(
            loss_sum=stats.loss_sum,
            tokens=sum(s.tokens for s in useful),
            forward_tokens=stats.forward_tokens,
            clipped=stats.clipped,
            ratio_sum=stats.ratio_sum,
            ratio_max=stats.ratio_max,
            trajectories=len(useful),
            logprob_gap_sum=stats.gap_sum,
            seconds=time.perf_counter() - started,
        )

    def _backward(self, packed: Pack, stats: _Sums) -> Loss:
        self._require_sums()  # gradients of windows go there directly
        new = self.forward.logprobs(packed, self.config.micro_step_tokens)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._reference.logprobs(packed, self.config.micro_step_tokens).to(new)
        recorded = np.concatenate([s.logprobs[s.mask] for s in packed.samples])
        behaviour = torch.from_numpy(recorded).to(new)
        loss = policy_loss(
            new,
            behaviour,
            torch.from_numpy(packed.rows).to(new.device),
            new.new_tensor([s.advantage for s in packed.samples]),
            new.new_tensor([s.weight for s in packed.samples]),
            self._loss_config,
            # Weights do not change within a step: the log-probs recomputed at its start are these very ones.
            prox=new.detach() if self.config.old_logprobs == "decoupled" else None,
            reference=reference,
        )
        value = float(loss.total.detach())
        if not np.isfinite(value):
            names = ", ".join(s.sample_id for s in packed.samples[:4])
            self.release()
            raise TrainingError(f"loss is {value}", where=f"samples {names}", right="local gradient sums were dropped")
        torch.autograd.backward(loss.total)
        self._collect()
        stats.loss_sum += value
        stats.gap_sum += float((new.detach() - behaviour).abs().sum())
        return loss

    def take_gradients(self) -> dict[str, Any]:
        """The local gradient sums by parameter name: views of one flat array, handed over, not copied. Resets them.

        Without sums (no trainable token since the last call) the dict is empty.
        """
        if self._sums is None:
            return {}
        sums, self._sums = self._sums, None
        self._drop_views()
        return {name: to_numpy(view) for name, view in self._views(sums).items()}

    def add_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Core only: add another replica's sums, all or nothing; an empty dict adds nothing.

        Raises:
            TrainingError: a name missing or unknown, another shape, or a value that is not finite.
        """
        if not gradients:
            return
        incoming = {name: to_tensor(np.asarray(array)) for name, array in gradients.items()}
        self._check_names(incoming, "gradients")
        for name, gradient in incoming.items():
            self._refuse_non_finite(gradient, "gradient handed over", name)
        for name, view in self._views(self._require_sums()).items():
            view.add_(incoming[name].to(device=view.device, dtype=view.dtype))

    def release(self) -> None:
        """Give gradient memory back and drop the local sums; called when the cell leaves training."""
        self._sums = None
        self._drop_views()

    # --- the step -------------------------------------------------------------------------------------------------

    def commit(self, n_executions: int) -> StepStats:
        """Core only: scale by 1/n_executions, clip, step the optimizer, version += 1, drop the sums.

        With no execution, or nothing but zeros in the sums (no trainable token, no variance in any group, all of it
        clipped away), there is no optimizer step and the version stays: momentum and weight decay must not move weights
        for which nothing was learned.
        """
        started = time.perf_counter()
        if self._optimizer is None:
            raise TrainingError("a satellite cannot commit", right="hand the sums to the core")
        rate = self.config.learning_rate * min(1.0, (self.steps + 1) / max(1, self.config.warmup_steps))
        norm = 0.0
        if n_executions > 0 and self._sums is not None:
            sums = self._sums.div_(n_executions)
            norm = float(torch.linalg.vector_norm(sums, dtype=torch.float64))
            if not np.isfinite(norm):
                self._refuse_non_finite(sums, "summed gradient")
                raise TrainingError(f"gradient norm is {norm}")
            if norm > self.config.max_grad_norm:
                sums.mul_(self.config.max_grad_norm / norm)
        if norm > 0.0:
            self._step(rate)
            self.steps += 1
            self.version += 1
        self.release()
        return StepStats(
            version=self.version,
            grad_norm=norm,
            learning_rate=rate if norm > 0.0 else 0.0,
            n_executions=n_executions,
            seconds=time.perf_counter() - started,
        )

    def _step(self, rate: float) -> None:
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        views = self._views(self._require_sums())
        for name, master in self._masters.items():
            master.grad = views[name]
        self._optimizer.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                master.grad = None
                self._parameters[name].copy_(master)
        self._optimizer.zero_grad(set_to_none=True)

    # --- weights --------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Any]:
        """Weights by Hugging Face parameter name, tied tensors once; views of live memory, valid until they change."""
        return {name: to_numpy(parameter) for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights in place, all or nothing; drops local gradient sums. Raises TrainingError."""
        incoming = {name: to_tensor(np.asarray(array)) for name, array in weights.items()}
        self._check_names(incoming, "weights")
        self.release()
        for name, parameter in self._parameters.items():
            parameter.copy_(incoming[name])
            if name in self._masters:
                self._masters[name].copy_(incoming[name])
        self.version = version

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint plus optimizer state to ``folder`` (which must not exist)."""
        optimizer = None if self._optimizer is None else self._optimizer.state_dict()
        state = {"optimizer": optimizer, "masters": self._masters}
        checkpoint.save(folder, self.model, state, self.version, self.steps, tokenizer_from=self._tokenizer_from)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Load what ``save`` wrote. Raises TrainingError when the checkpoint is damaged or of another model."""
        loaded = checkpoint.load(folder, self.model)
        self.release()
        for name, parameter in self._parameters.items():
            parameter.copy_(loaded.weights[name])
            if name in self._masters:
                self._masters[name].copy_(loaded.optimizer["masters"].get(name, loaded.weights[name]))
        if self._optimizer is not None and loaded.optimizer["optimizer"] is not None:
            self._optimizer.load_state_dict(loaded.optimizer["optimizer"])
        self.version, self.steps = loaded.version, loaded.steps

    # --- inside ---------------------------------------------------------------------------------------------------

    def _make_optimizer(self) -> torch.optim.Optimizer:
        targets: list[Tensor] = []
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                continue  # frozen: weight decay must not move it either
            if parameter.dtype == self._sum_dtype:
                targets.append(parameter)
            else:
                self._masters[name] = parameter.detach().to(self._sum_dtype, copy=True)
                targets.append(self._masters[name])
        return torch.optim.AdamW(
            targets,
            lr=self.config.learning_rate,
            betas=(self.config.beta1, self.config.beta2),
            eps=self.config.adam_eps,
            weight_decay=self.config.weight_decay,
            fused=True,
        )

    def _require_sums(self) -> Tensor:
        if self._sums is None:
            count = sum(p.numel() for p in self._parameters.values())
            self._sums = torch.zeros(count, dtype=self._sum_dtype, device=self.model.device)
            for name, view in self._views(self._sums).items():
                if self._parameters[name].dtype == self._sum_dtype:
                    self._parameters[name].grad = view
        return self._sums

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [p.numel() for p in self._parameters.values()])
        return {n: x.view_as(p) for (n, p), x in zip(self._parameters.items(), parts, strict=True)}

    def _collect(self) -> None:
        """Move 16-bit gradients into the sums; others were accumulated there by the backward pass itself."""
        for name, view in self._views(self._require_sums()).items():
            parameter = self._parameters[name]
            if parameter.dtype != self._sum_dtype and parameter.grad is not None:
                view.add_(parameter.grad)
                parameter.grad = None

    def _drop_views(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _refuse_non_finite(self, values: Tensor, what: str, name: str | None = None) -> None:
        if bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all()):
            return  # the sum is finite only if every term is; a sum that overflowed is looked at again
        if name is None:
            name = next(n for n, view in self._views(values).items() if not bool(torch.isfinite(view).all()))
            self.release()
        raise TrainingError(f"{what} is not finite", where=f"parameter {name}")

    def _check_names(self, incoming: Mapping[str, Tensor], what: str) -> None:
        missing = [n for n in self._parameters if n not in incoming]
        unknown = [n for n in incoming if n not in self._parameters]
        if missing or unknown:
            raise TrainingError(f"{what}: {len(missing)} missing, {len(unknown)} unknown", where=(missing + unknown)[0])
        for name, parameter in self._parameters.items():
            if incoming[name].shape != parameter.shape:
                got, right = list(incoming[name].shape), list(parameter.shape)
                raise TrainingError(f"{what} have shape {got}", where=f"parameter {name}", right=f"{right}")


class _Sums:
    """What a micro-step adds up over its forward passes."""

    def __init__(self) -> None:
        self.loss_sum = self.gap_sum = self.ratio_sum = self.ratio_max = 0.0
        self.clipped = self.forward_tokens = 0
