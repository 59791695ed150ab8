"""Loading a model, and refusing what the embedded engine cannot serve right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

from opengyre.errors import ConfigError
from opengyre.rollout.torch_model import HFRunner, kv_layout, load_model, pick_runner
from rollout_making import SIZES, VOCAB, Heard, make_engine, make_model, request, tokens


def test_a_saved_model_loads_and_samples_the_same(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "cpu", torch.float32)
    assert not loaded.training and next(loaded.parameters()).dtype == torch.float32
    said = []
    for each in (model, loaded):
        engine = make_engine(each)
        engine.submit(request("c", tokens(1, 20)))
        said.append(Heard().run(engine).ids("c"))
    assert said[0] == said[1]


def test_a_missing_or_broken_folder_is_a_config_error_that_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json in .*absent.*safetensors"):
        load_model(tmp_path / "absent", "cpu", torch.float32)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no weights in .*safetensors"):
        load_model(tmp_path, "cpu", torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="cannot load"):
        load_model(tmp_path, "cpu", torch.float32)


def test_a_recurrent_model_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)).eval()
    with pytest.raises(ConfigError, match="not a KV cache"):
        make_engine(model)


def test_a_model_with_its_own_mask_convention_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(ConfigError, match=r"model\.path"):
        make_engine(model)


def test_a_forward_that_differs_from_the_model_is_never_picked() -> None:
    model, other = make_model(), make_model(seed=1)
    layout = kv_layout(model)
    right = HFRunner(model, layout)
    assert pick_runner(model, layout, [HFRunner(other, layout), right], 128) is right
    with pytest.raises(ConfigError, match="does not reproduce its own logits"):
        pick_runner(model, layout, [HFRunner(other, layout)], 128)


def test_the_self_check_looks_past_a_sliding_window() -> None:
    model = make_model("gemma3")
    layout = kv_layout(model)
    blind = HFRunner(model, layout)
    blind.window = None  # as if it had not seen the window
    with pytest.raises(ConfigError, match="does not reproduce"):
        pick_runner(model, layout, [blind], SIZES["max_position_embeddings"])
