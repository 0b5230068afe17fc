"""Tests checkpoints: every damage gives one clear line, and the fingerprint follows the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import export_checkpoint, open_model

NAME = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=96,vocab=300,context=256"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_checkpoint(open_model(NAME, "float32"), tmp_path)
    return tmp_path


def _change(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    held = {**load_file(path), **tensors}
    save_file({k: v for k, v in held.items() if v is not None}, path)


def _refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(str(folder), "float32")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_loads_what_was_saved_in_either_dtype(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")[UP]
    assert torch.equal(open_model(str(folder), "float32").weights.load(UP), saved)
    narrow = open_model(str(folder), "bfloat16").weights.load(UP)
    assert torch.equal(narrow, saved.to(torch.bfloat16))


def test_missing_tensor(folder: Path) -> None:
    _change(folder, **{UP: None})
    assert UP in _refused(folder)


def test_misshapen_tensor(folder: Path) -> None:
    _change(folder, **{UP: torch.zeros(96, 63)})
    message = _refused(folder)
    assert UP in message
    assert "[96, 63]" in message
    assert "[96, 64]" in message


def test_unexpected_tensor(folder: Path) -> None:
    _change(folder, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    assert "q_norm" in _refused(folder)


def test_quantised_tensor(folder: Path) -> None:
    _change(folder, **{UP: torch.zeros(96, 64, dtype=torch.int8)})
    assert "I8" in _refused(folder)


def test_ignored_tensor_is_ignored(folder: Path) -> None:
    _change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert open_model(str(folder), "float32").spec.num_layers == 2


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors" in _refused(folder)


def test_missing_shard(folder: Path) -> None:
    names = load_file(folder / "model.safetensors").keys()
    index = {"weight_map": dict.fromkeys(names, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in _refused(folder)


def test_no_weights_no_config_no_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "safetensors" in _refused(folder)
    (folder / "config.json").write_text("{")
    assert "JSON" in _refused(folder)
    (folder / "config.json").unlink()
    assert "config.json" in _refused(folder)
    assert "does not exist" in _refused(folder / "nowhere")


def test_weights_of_another_format_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only pytorch_model.bin; other weight formats" in _refused(folder)


def test_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "someone/some-model" in _refused(Path("someone/some-model"))


def test_fingerprint_follows_weights_and_config(folder: Path) -> None:
    before = open_model(str(folder), "float32").fingerprint
    assert open_model(str(folder), "bfloat16").fingerprint == before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    other_config = open_model(str(folder), "float32").fingerprint
    _change(folder, **{UP: load_file(folder / "model.safetensors")[UP] * 1.01})
    other_weights = open_model(str(folder), "float32").fingerprint
    assert len({before, other_config, other_weights}) == 3


def test_generation_config_adds_ends(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert set(open_model(str(folder), "float32").spec.eos_token_ids) == {2, 5}


def test_generation_config_says_how_to_draw(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_model(str(folder), "float32").sampling == {}
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "max_length": 9}
    wrong = {"min_p": 7, "repetition_penalty": "much"}
    (folder / "generation_config.json").write_text(json.dumps(said | wrong))
    found = open_model(str(folder), "float32").sampling
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    limit = folder / "generation_config.json"
    for text, sampling in (("300", {"max_tokens": 300}), ("0", {}), ("2.5", {})):
        limit.write_text(f'{{"max_new_tokens": {text}}}')
        assert open_model(str(folder), "float32").sampling == sampling
    assert "min_p 7 is left out" in caplog.text and "'much' is left out" in caplog.text
