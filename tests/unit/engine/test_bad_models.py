"""Descriptions of models that nothing can hold are refused in one line, before memory is used."""

from __future__ import annotations

import pytest

from moonpool.engine.families.config import parse_config
from moonpool.engine.random_weights import random_spec
from moonpool.engine.spec import ModelError

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
