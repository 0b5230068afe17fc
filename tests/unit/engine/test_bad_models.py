"""Tests that descriptions of models that no machine can hold are refused in one line, before memory
is used."""

from __future__ import annotations

import pytest

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.families.config import parse_config
from moonpool_engine.engine.random_weights import random_spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    "words",
    [
        "hidden=0,layers=0,heads=0,kv_heads=0,inter=0,vocab=0",
        "heads=0",
        "hidden=8,heads=16",
        "m30,layers=1000000000",
        f"m30,vocab={1 << 40}",
    ],
)
def test_impossible_random_models_are_refused(words: str) -> None:
    with pytest.raises(ModelError, match="must be at least 1"):
        random_spec(f"random:{words}")


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"]
)
def test_an_impossible_size_is_refused_by_its_name(name: str) -> None:
    parse_config(CONFIG)
    with pytest.raises(ModelError, match=f"{name} is 1000000000; at most"):
        parse_config(CONFIG | {name: 1_000_000_000})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, not a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a positive integer"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a positive integer"),
        ({"vocab_size": True}, "vocab_size is True, not a positive integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a number above 0"),
        ({"rope_theta": 10**400}, "rope_theta is 10000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ({"eos_token_id": [[1]]}, "eos_token_id is [[1]], not a token id or a list of them"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000; at most"),
        ({"architectures": [{}]}, "architectures is [{}], not a list of texts"),
        ({"rope_scaling": {"type": []}}, "rope_scaling.type is [], not a text"),
    ],
)
def test_each_wrong_value_is_named_with_its_file_and_field(
    change: dict[str, object], says: str
) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config(CONFIG | change, "/models/x/config.json")
    assert str(caught.value).startswith(f"/models/x/config.json: {says}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_experts_that_nothing_can_hold_are_refused() -> None:
    mixture = {
        "architectures": ["OlmoeForCausalLM"],
        "num_hidden_layers": 4096,
        "num_experts": 4096,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
    }
    with pytest.raises(ModelError, match="4096 layers of 4096 experts; at most"):
        parse_config(CONFIG | mixture)


def test_a_config_of_no_model_says_what_it_lacks() -> None:
    with pytest.raises(ModelError, match="has neither 'architectures' nor 'model_type'"):
        parse_config({})
