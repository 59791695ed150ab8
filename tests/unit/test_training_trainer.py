"""The reference trainer: sums, steps, refusals."""

from __future__ import annotations

import math

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.config import TrainConfig
from opengyre.errors import ConfigError, TrainingError
from opengyre.training.torch_trainer import TorchTrainer
from opengyre.transfer.arrays import BFLOAT16
from training_models import VOCAB, make_sample, random_samples, tiny_qwen3

torch.set_num_threads(1)

NO_CLIP = {"clip_low": 99.0, "clip_high": 99.0}


def trainer(seed: int = 0, *, core: bool = True, dtype: torch.dtype = torch.float64, **config) -> TorchTrainer:
    """Without a clip unless asked: the samples' log-probabilities are not this model's."""
    return TorchTrainer(tiny_qwen3(seed, dtype), TrainConfig(**{**NO_CLIP, **config}), core=core)


def taken(samples, **config):
    t = trainer(**config)
    t.micro_step(samples)
    return t.take_gradients()


def close(a, b, tolerance=1e-13):
    assert a.keys() == b.keys()
    for name in a:
        assert np.abs(a[name] - b[name]).max() <= tolerance, name


def test_gradient_equals_the_formula_written_out():
    """GSPO of SPEC §4.2 with plain autograd on full logits, one sample at a time."""
    samples = random_samples(1)
    model = tiny_qwen3(0)
    total = 0.0
    for s in samples:
        ids = torch.from_numpy(s.ids.astype(np.int64))
        t = torch.from_numpy(np.flatnonzero(s.mask))
        new = model(input_ids=ids[None]).logits[0].log_softmax(-1)[t - 1, ids[t]]
        old = torch.from_numpy(s.logprobs[s.mask].astype(np.float64))
        ratio = (new - old).mean().exp().detach() * (new - new.detach()).exp()
        value = torch.minimum(ratio * s.advantage, ratio.clamp(0.8, 1.4) * s.advantage)
        total = total - s.weight * value.sum()
    total.backward()
    want = {name: p.grad.numpy() for name, p in model.named_parameters()}
    t = trainer(clip_low=0.2, clip_high=0.4)
    stats = t.micro_step(samples)
    close(t.take_gradients(), want)
    assert 0 < stats.clipped < stats.tokens
    assert stats.loss_sum == pytest.approx(total.item(), rel=1e-12)
    assert stats.tokens == sum(s.tokens for s in samples) and stats.trajectories == len(samples)
    assert stats.forward_tokens < sum(len(s.ids) for s in samples)  # shared prefixes once


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(64, 300), st.booleans())
def test_any_split_gives_the_same_sums(seed, parts, budget, trees):
    """N03, N05: micro-steps, budgets and ranks change nothing."""
    samples = random_samples(1)
    whole = taken(samples)
    shuffled = list(samples)
    np.random.default_rng(seed).shuffle(shuffled)
    t = trainer(micro_step_tokens=budget)
    t.forward.trees = trees
    for part in range(parts):
        t.micro_step(shuffled[part::parts])
    close(t.take_gradients(), whole)


def test_splitting_a_trajectory_in_two_changes_no_gradient():
    """N03 with the ratio at 1 (behaviour = current): the second half's context is the first half."""
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, VOCAB, 20), np.arange(20) >= 8
    whole = make_sample(ids, mask, weight=1 / 12)
    cut = 14
    halves = [
        make_sample(ids[:cut], mask[:cut], name="a", weight=1 / 12),
        make_sample(ids, mask & (np.arange(20) >= cut), name="b", weight=1 / 12),
    ]
    close(taken(halves, old_logprobs="decoupled", tis_cap=1e-9), taken([whole], old_logprobs="decoupled", tis_cap=1e-9))


def test_masked_tokens_get_no_gradient_and_change_nothing():
    """N07: replacing the last, masked token changes no gradient; tokens of its row in the head see none of it."""
    ids = np.arange(10)
    mask = np.array([0, 0, 0, 1, 1, 1, 1, 0, 0, 0], bool)
    other = ids.copy()
    other[-1] = 40
    close(taken([make_sample(ids, mask)]), taken([make_sample(other, mask)]), 0.0)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_ratio_is_one_on_unchanged_weights(temperature):
    """N08: behaviour log-probs after temperature, and the trainer's new ones too."""
    model = tiny_qwen3()
    ids = np.random.default_rng(0).integers(0, VOCAB, 16)
    logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0] / temperature
    logprobs = np.full(16, np.nan)
    logprobs[1:] = logits.log_softmax(-1)[torch.arange(15), torch.from_numpy(ids[1:])].detach().numpy()
    t = TorchTrainer(model, TrainConfig(), temperature=temperature)
    stats = t.micro_step([make_sample(ids, np.arange(16) > 0, logprobs=logprobs)])
    assert stats.ratio_sum == pytest.approx(1.0, abs=1e-6) and stats.logprob_gap_sum < 1e-5 and stats.clipped == 0


def test_temperature_by_hand():
    """N08: logits [2, 0, -1] at T = 0.5, token 0: -0.0206, not -0.1699."""
    from opengyre.training.forward import _gather

    states = torch.tensor([[2.0, 0.0, -1.0]])
    assert _gather(states, torch.tensor([0]), torch.nn.Identity(), 0.5).item() == pytest.approx(-0.0206, abs=1e-3)
    assert _gather(states, torch.tensor([0]), torch.nn.Identity(), 1.0).item() == pytest.approx(-0.1699, abs=1e-3)


def test_the_ratio_is_against_what_was_sampled():
    """N11: after the weights moved, log-probs recorded at sampling anchor the ratio, whatever versions they mix."""
    t = trainer()
    sample = random_samples(3, executions=1, paths=1)[0]
    before = t.micro_step([sample]).ratio_sum
    t.commit(1)
    after = t.micro_step([sample]).ratio_sum
    assert t.version == 1 and before != after


def test_push_equals_local():
    samples = random_samples(5)
    alone, core, satellite = trainer(weight_decay=0.1), trainer(weight_decay=0.1), trainer(core=False)
    for step in range(3):
        alone.micro_step(samples)
        core.micro_step(samples[:5])
        satellite.micro_step(samples[5:])
        core.add_gradients(satellite.take_gradients())
        assert satellite.take_gradients() == {}
        a, b = alone.commit(4), core.commit(4)
        satellite.load_weights(core.weights(), core.version)
        assert a.version == b.version == satellite.version == step + 1
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-12) and a.grad_norm > 0
    close(alone.weights(), core.weights(), 1e-12)
    close(alone.weights(), satellite.weights(), 1e-12)


def test_gradients_are_scaled_clipped_and_stepped_as_written():
    """One AdamW step by hand: at step 1, m/sqrt(v) is the gradient's sign."""
    t = trainer(learning_rate=0.01, max_grad_norm=1e9, adam_eps=1e-300)
    before = {n: w.copy() for n, w in t.weights().items()}
    t.micro_step(random_samples(6))
    sums = {n: g.copy() for n, g in t.take_gradients().items()}
    t.add_gradients(sums)
    stats = t.commit(4)
    norm = math.sqrt(sum(float((g**2).sum()) for g in sums.values())) / 4
    assert stats.grad_norm == pytest.approx(norm, rel=1e-12) and stats.learning_rate == 0.01
    for name, weights in t.weights().items():
        moved = np.where(sums[name] == 0, 0.0, 0.01 * np.sign(sums[name]))
        np.testing.assert_allclose(before[name] - weights, moved, atol=1e-9)


def test_clip_and_warm_up():
    t = trainer(learning_rate=0.1, warmup_steps=4, max_grad_norm=1e-3)
    rates = []
    for _ in range(5):
        t.micro_step(random_samples(7))
        rates.append(t.commit(4).learning_rate)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


@pytest.mark.parametrize(
    ("samples", "executions"),
    [
        ([], 4),
        ([make_sample([1, 2, 3], [0, 0, 0])], 1),  # nothing trainable
        ([make_sample([1, 2, 3], [0, 1, 1], advantage=0.0)], 1),  # no variance in the group
        ([make_sample([1, 2, 3], [0, 1, 1], weight=0.0)], 1),
        ([make_sample([1, 2, 3], [0, 1, 1])], 0),  # no valid execution
    ],
)
def test_nothing_learned_moves_nothing(samples, executions):
    """N10: no optimizer step, no version, although momentum and weight decay would move the weights."""
    t = trainer(weight_decay=0.5)
    t.micro_step(random_samples(8))
    t.commit(4)
    before = {n: w.copy() for n, w in t.weights().items()}
    t.micro_step(samples)
    stats = t.commit(executions)
    assert (stats.version, t.version, stats.grad_norm, stats.learning_rate) == (1, 1, 0.0, 0.0)
    close(t.weights(), before, 0.0)
    t.micro_step(random_samples(8))
    assert t.commit(4).version == 2


def test_broken_gradients_are_refused_whole():
    t = trainer()
    t.micro_step(random_samples(9))
    good = {n: g.copy() for n, g in t.take_gradients().items()}
    t.add_gradients(good)
    name = "model.layers.1.mlp.up_proj.weight"
    for value in (math.nan, math.inf, -math.inf):
        bad = {n: g.copy() for n, g in good.items()}
        bad[name][3, 4] = value
        with pytest.raises(TrainingError, match=name):
            t.add_gradients(bad)
    for bad, text in [
        ({n: g for n, g in good.items() if n != name}, name),
        ({**good, "extra": good[name]}, "extra"),
        ({**good, name: good[name].T}, r"\[32, 48\]"),
    ]:
        with pytest.raises(TrainingError, match=text):
            t.add_gradients(bad)
    close(t.take_gradients(), good, 0.0)


def test_a_broken_loss_names_its_sample_and_drops_the_sums():
    t = trainer()
    samples = random_samples(10)
    t.micro_step(samples)
    with torch.no_grad():
        t.model.model.norm.weight[0] = math.nan
    with pytest.raises(TrainingError, match="e0k0"):
        t.micro_step(samples[:1])
    assert t.take_gradients() == {}


def test_a_broken_gradient_names_its_parameter():
    t = trainer()
    t.micro_step(random_samples(10)[:1])
    broken = t.model.model.layers[1].mlp.down_proj.weight
    hook = broken.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainingError, match=r"layers\.1\.mlp\.down_proj"):
        t.micro_step(random_samples(10)[:1])
    hook.remove()
    assert t.take_gradients() == {}


def test_a_satellite_has_no_optimizer():
    with pytest.raises(TrainingError, match="satellite"):
        trainer(core=False).commit(1)


def test_load_weights_is_whole_or_not_at_all():
    t = trainer()
    other = trainer(seed=1).weights()
    before = {n: w.copy() for n, w in t.weights().items()}
    with pytest.raises(TrainingError, match="lm_head"):
        t.load_weights({**other, "lm_head.weight": other["model.embed_tokens.weight"]}, 7)
    with pytest.raises(TrainingError, match="shape"):
        t.load_weights({**other, "model.norm.weight": np.zeros(3)}, 7)
    close(t.weights(), before, 0.0)
    t.micro_step(random_samples(1))
    t.load_weights(other, 7)
    close(t.weights(), other, 0.0)
    assert t.version == 7 and t.take_gradients() == {}
    assert t.model.lm_head.weight is t.model.model.embed_tokens.weight


def test_release_gives_the_memory_back():
    """50 rounds of training and leaving: no gradient stays, memory is flat."""
    t = trainer(core=False, dtype=torch.float32, micro_step_tokens=256)
    samples = random_samples(11)
    sizes = []
    for _ in range(50):
        t.micro_step(samples)
        assert all(p.grad is not None for p in t.model.parameters())
        t.release()
        assert all(p.grad is None for p in t.model.parameters())
        sizes.append(psutil.Process().memory_info().rss)
    assert max(sizes[40:]) - max(sizes[5:15]) < 16 << 20


def test_bfloat16_sums_in_float32_and_steps_masters():
    t = trainer(dtype=torch.bfloat16, learning_rate=1e-4)
    exact = trainer(dtype=torch.float32, learning_rate=1e-4)
    exact.load_weights({n: p.detach().float().numpy() for n, p in t.model.named_parameters()}, 0)
    for _ in range(8):
        for each in (t, exact):
            each.micro_step(random_samples(12))
            each.commit(4)
    gradients = t.micro_step(random_samples(12)) and t.take_gradients()
    assert all(g.dtype == np.float32 for g in gradients.values())
    assert all(w.dtype == BFLOAT16 for w in t.weights().values())
    for name, p in exact.model.named_parameters():  # steps of 1e-4 are lost in bfloat16 weights, not in the masters
        assert (t._masters[name] - p).abs().mean().item() < 1e-4
    satellite = trainer(core=False, dtype=torch.bfloat16, seed=3)
    satellite.load_weights(t.weights(), t.version)
    for a, b in zip(satellite.model.parameters(), t.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_reference_policy():
    with pytest.raises(ConfigError, match="kl_weight"):
        trainer(kl_weight=0.1)
    samples = random_samples(13)
    config = TrainConfig(clip_low=99.0, clip_high=99.0, kl_weight=0.1)
    same = TorchTrainer(tiny_qwen3(0), config, reference=tiny_qwen3(0))
    same.micro_step(samples)
    close(same.take_gradients(), taken(samples), 1e-13)  # at the reference itself k3 is flat
    away = TorchTrainer(tiny_qwen3(0), config, reference=tiny_qwen3(1))
    away.micro_step(samples)
    pulled, free = away.take_gradients(), taken(samples)
    assert any(np.abs(pulled[name] - free[name]).max() > 1e-6 for name in free)
    assert all(p.grad is None for p in away._reference._model.parameters())


def test_frozen_parameters_stay():
    t = trainer()
    t.model.model.embed_tokens.weight.requires_grad_(False)
    t = TorchTrainer(t.model, TrainConfig(**NO_CLIP, weight_decay=0.5))
    before = {n: w.copy() for n, w in t.weights().items()}
    t.micro_step(random_samples(14))
    t.commit(4)
    name = "model.embed_tokens.weight"
    assert [n for n, w in t.weights().items() if np.array_equal(w, before[n])] == [name]


def test_learns():
    """A bandit in tokens: the rewarded first token becomes likelier."""
    t = trainer(dtype=torch.float32, learning_rate=3e-3, clip_low=99.0, clip_high=99.0)
    good = make_sample([1, 2, 3, 7], [0, 0, 0, 1], name="good", execution="a", advantage=1.0)
    bad = make_sample([1, 2, 3, 9], [0, 0, 0, 1], name="bad", execution="b", advantage=-1.0)
    for _ in range(10):
        t.micro_step([good, bad])
        t.commit(2)
    with torch.no_grad():
        logits = t.model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    assert logits[7] - logits[9] > 1.0
