"""Tests the reading of config.json: both spellings, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.families.config import parse_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def test_old_and_new_rope_spelling_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": {**scaling, "type": "llama3"}}
    new = {**BASE, "rope_parameters": {**scaling, "rope_type": "llama3", "rope_theta": 5e5}}
    assert parse_config(old).rope == parse_config(new).rope
    assert parse_config(old).rope.theta == 5e5
    assert parse_config({**BASE, "rope_scaling": None}).rope.kind == "default"


def test_families_differ_in_biases_and_norms() -> None:
    qwen2 = parse_config({**BASE, "architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, "")
    qwen3 = parse_config({**BASE, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, "head")
    llama = parse_config({**BASE, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


def test_what_a_mistral_leaves_out_is_a_window() -> None:
    longer = {**BASE, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    assert parse_config(longer).windows == (4096, 4096)
    assert parse_config({**longer, "sliding_window": None}).windows == ()


def test_several_ends() -> None:
    assert parse_config({**BASE, "eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert parse_config({**BASE, "eos_token_id": 0}).eos_token_ids == (0,)
    assert parse_config({**BASE, "eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("architecture", "change", "windows"),
    [
        ("Mistral", {"sliding_window": 100}, (100, 100)),
        ("Mistral", {"sliding_window": 4096}, ()),
        ("Mistral", {"sliding_window": None}, ()),
        ("Qwen2", {"sliding_window": 100}, ()),
        ("Qwen2", {"sliding_window": 100, "use_sliding_window": True}, ()),
        (
            "Qwen2",
            {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1},
            (0, 100),
        ),
        ("Gemma2", {"sliding_window": 100}, (100, 0)),
        ("Gemma3", {"sliding_window": 100}, (100, 100)),
        ("Gemma3", {"sliding_window": 100, "sliding_window_pattern": 2}, (100, 0)),
        ("Llama", {"sliding_window": 100}, ()),
    ],
)
def test_layers_have_the_windows_that_the_family_gives_them(
    architecture: str, change: dict[str, Any], windows: tuple[int, ...]
) -> None:
    spec = parse_config({**BASE, "architectures": [f"{architecture}ForCausalLM"], **change})
    assert spec.windows == windows
    assert spec.max_positions == 256


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["Gemma4ForCausalLM"]}, "Gemma4F.*nearest that is served is Gemma"),
        ({"architectures": ["Olmo4ForCausalLM"]}, "Olmo4.*nearest that is served is Olmo"),
        ({"architectures": None, "model_type": "bert"}, "bert.*LlamaForCausalLM"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "layer_types": ["x", "y"],
                "sliding_window": 9,
            },
            "type '[xy]'",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["x"], "sliding_window": 9},
            "layer_types",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "causal"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised.*awq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope.*yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "rope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', not a list"),
        ({"quantization_config": "gptq"}, "quantization_config is 'gptq', not an object"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "rope_scaling.factor is 0, not a number above 0",
        ),
        ({"rope_theta": "x"}, "rope_theta is 'x', not a number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', not a number"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id is"),
        ({"head_dim": 24}, "head_dim 24; only multiples of 16"),
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba"] * 2},
            "layers of state spaces",
        ),
        (
            {
                "architectures": ["GraniteMoeHybridForCausalLM"],
                "layer_types": ["attention"] * 2,
                "num_local_experts": 8,
            },
            "num_local_experts is not 0",
        ),
        (
            {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0},
            "clip_qkv is not null",
        ),
        (
            {"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLX"},
            "has not only L and G",
        ),
        (
            {
                "architectures": ["Glm4MoeForCausalLM"],
                "mlp_layer_types": ["dense"],
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
            },
            "mlp_layer_types names no kind",
        ),
    ],
)
def test_refusals_say_what_is_wrong(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){says}") as caught:
        parse_config({**BASE, **change})
    assert "\n" not in str(caught.value)


def test_a_gemma_that_sees_images_is_read_by_its_text_part() -> None:
    """The first Gemma 3 checkpoints have a text part that leaves out most sizes."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 12,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = parse_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": text,
            "vision_config": {"hidden_size": 1152},
        }
    )
    sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size)
    assert sizes == (8, 4, 256, 262208)
    assert spec.eos_token_ids == (1, 106)
    assert spec.windows == (1024,) * 5 + (0,) + (1024,) * 5 + (0,)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta) == ("linear", 8.0, 1e6)
    assert spec.local_rope is not None and spec.local_rope.theta == 1e4


def test_a_pattern_of_letters_says_which_layers_have_the_window() -> None:
    changes = {
        "architectures": ["Exaone4ForCausalLM"],
        "num_hidden_layers": 6,
        "sliding_window": 64,
        "sliding_window_pattern": "LLG",
    }
    spec = parse_config({**BASE, **changes})
    assert spec.windows == (64, 64, 0, 64, 64, 0)
    assert spec.no_rope == (2, 5), "layers that see all have no RoPE"
    spec = parse_config({**BASE, **changes, "sliding_window": None, "sliding_window_pattern": None})
    assert (spec.windows, spec.no_rope) == ((), ())
