"""Tests families in GGUF files, with the names and orders of llama.cpp's converter: they give the
logits of `transformers`, and the bits of the same weights in a folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.gguf.architectures import ARCHITECTURES
from tests.differential.checkpoints import CASES, DELTA, SHARED, YARN, Case, save
from tests.differential.gguf_conversion import convert
from tests.differential.plans import Lab, make_ops
from tests.differential.test_families import check_plans

PROMPT = [random.Random(4).randrange(300) for _ in range(90)]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 6}
LINEAR = {
    **DELTA, "layer_types": None, "num_hidden_layers": 4,
    # equal to the key's, because llama.cpp has one size for keys and values
    "linear_value_head_dim": 32,
}  # fmt: skip
FILES: dict[str, tuple[str, Case]] = {
    "mixtral": (
        "llama",
        Case("Mixtral", {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 96,
        }),
    ),
    "qwen3moe": (
        "qwen3moe", Case("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
    ),
    "gpt-oss": (
        "gpt-oss",
        Case("GptOss", {
            "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 24,
            "head_dim": 32, "pad_token_id": 0, "intermediate_size": 64,
            "rope_parameters": {**YARN, "truncate": False},
        }),
    ),
    "gemma": ("gemma", CASES["gemma"]),
    "gemma2": (
        "gemma2", Case("Gemma2", {**CASES["gemma2"].changes, "query_pre_attn_scalar": 256}),
    ),
    "gemma3": (
        "gemma3",
        Case("Gemma3Text", {
            **CASES["gemma3"].changes, "num_hidden_layers": 7, "query_pre_attn_scalar": 32,
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        }),
    ),
    "phi3": ("phi3", CASES["phi3"]),
    "phi4-mini": ("phi3", CASES["phi4-mini"]),
    "olmo2": ("olmo2", Case("Olmo2", {**CASES["olmo2"].changes, "num_key_value_heads": 2})),
    "granite": ("granite", CASES["granite"]),
    "granite-moe": ("granitemoe", CASES["granite-moe"]),
    "olmo3": ("olmo2", CASES["olmo3"]),
    "olmoe": ("olmoe", CASES["olmoe"]),
    "exaone4": ("exaone4", CASES["exaone4"]),
    "exaone4-full": ("exaone4", CASES["exaone4-full"]),
    "seed-oss": ("seed_oss", CASES["seed-oss"]),
    "seed-oss-biases": (
        "seed_oss",
        Case("SeedOss", {"head_dim": 48, "attention_bias": True, "attention_out_bias": True}),
    ),
    "ernie4.5": ("ernie4_5", CASES["ernie4.5"]),
    "glm4": ("glm4", CASES["glm4"]),
    "glm4-without-biases": ("glm4", CASES["glm4-without-biases"]),
    "glm4-moe": ("glm4moe", CASES["glm4-moe"]),
    "glm4-moe-air": ("glm4moe", CASES["glm4-moe-air"]),
    "qwen3.5": ("qwen35", Case("Qwen3_5Text", LINEAR)),
    "qwen3.5-moe": ("qwen35moe", Case("Qwen3_5MoeText", {**LINEAR, **SHARED})),
    "smollm3": (
        "smollm3", Case("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    ),
}  # fmt: skip
for _name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "kimi-k2"):
    # GGUF files do not state these two: biases, and a rotation of halves.
    _told = {"attention_bias": False, "rope_interleave": True}
    _changes = CASES[_name].changes
    _changes = {key: _told.get(key, value) for key, value in _changes.items()}
    FILES[_name] = ("deepseek2", Case(CASES[_name].family, _changes))
FILES["moonlight"] = ("deepseek2", Case("DeepseekV3", {
    **CASES["kimi-k2"].changes, "q_lora_rank": None, "rope_interleave": True,
}))  # fmt: skip
FILES["glm4-moe-lite"] = ("deepseek2", CASES["glm4-moe-lite"])
MIXTURES = ("mixtral", "qwen3moe", "gpt-oss")
Opened = Callable[[str], tuple[Path, Path, Any]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Returns the folder, the file, and transformers' model of a case."""

    @cache
    def made(name: str) -> tuple[Path, Path, Any]:
        architecture, case = FILES[name]
        folder = tmp_path_factory.mktemp(name)
        theirs = save(case, folder)
        return folder, convert(folder, architecture).write(folder / "model.gguf"), theirs

    return made


def logits(model: Path, ops_name: str = "native") -> Tensor:
    return Lab(open_model(str(model), "float32"), make_ops(ops_name), 16, 200).whole(PROMPT)


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_transformers(opened: Opened, name: str) -> None:
    folder, file, theirs = opened(name)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0, -1]
    found = logits(file)
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    # The converter added 1 to the weights of these norms, which rounded them once more.
    if not ARCHITECTURES[FILES[name][0]].baked_norms:
        assert torch.equal(found, logits(folder))


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_stay_quantized(opened: Opened, name: str, tmp_path: Path) -> None:
    folder, _, _ = opened(name)
    quantized = convert(folder, FILES[name][0], "Q8_0").write(tmp_path / "q8.gguf")
    model = open_model(str(quantized), "float32")
    # The same weights in a folder are the file's weights, dequantized.
    stored = load_file(folder / "model.safetensors")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((folder / "config.json").read_text())
    _put_experts(model, stored)
    save_file(stored, plain / "model.safetensors")
    exact = logits(plain)
    found = logits(quantized)
    assert not torch.equal(found, logits(folder))
    assert (found - exact).abs().max() < 5e-3 * exact.abs().max()
    check_plans(model, "native", num_shards=1)


def _put_experts(model: Any, stored: dict[str, Tensor]) -> None:
    spec = model.spec
    for layer in range(spec.num_layers):
        for expert in range(spec.experts.count):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                model.weights.load(f"{prefix}.{expert}.{part}_proj.weight")
                for part in ("gate", "up", "down")
            )
            if spec.family == "gpt_oss":
                stored[f"{prefix}.gate_up_proj"][expert][:, 0::2] = gate.t()
                stored[f"{prefix}.gate_up_proj"][expert][:, 1::2] = up.t()
                stored[f"{prefix}.down_proj"][expert] = down.t()
                continue
            names = ("gate_proj", "up_proj", "down_proj")
            if spec.family == "mixtral":
                prefix = f"model.layers.{layer}.block_sparse_moe.experts"
                names = ("w1", "w3", "w2")
            for word, weight in zip(names, (gate, up, down), strict=True):
                assert f"{prefix}.{expert}.{word}.weight" in stored
                stored[f"{prefix}.{expert}.{word}.weight"] = weight


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qwen3moe.expert_count": 0}, "needs one"),
        ({"qwen3moe.expert_count": 7}, "by the metadata it must be"),
        ({"qwen3moe.expert_used_count": 9}, "cannot use 9 of 6 experts"),
        ({"qwen3moe.expert_count": 1 << 30}, "at most"),
        ({"general.architecture": "chatglm"}, "supported in GGUF"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(
    opened: Opened, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    draft = convert(opened("qwen3moe")[0], "qwen3moe")
    draft.metadata |= changes
    with pytest.raises(ModelError, match=words) as found:
        open_model(str(draft.write(tmp_path / "wrong.gguf")), "float32")
    assert "\n" not in str(found.value)
