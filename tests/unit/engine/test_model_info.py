"""Tests the info of models whose weights are on other machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.text.model_error import ModelError
from moonpool.text.model_info import read_model_info


def folder(path: Path, config: dict[str, Any], **others: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    for name, content in others.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


def test_any_architecture_will_do(tmp_path: Path) -> None:
    config = {"architectures": ["SomethingMoE"], "vocab_size": 1000, "eos_token_id": 0}
    found = read_model_info(folder(tmp_path, config))
    assert (found.vocab_size, found.eos_token_ids) == (1000, (0,))
    assert found.tokenizer == str(tmp_path)


def test_a_multimodal_model_has_its_vocabulary_in_text_config(tmp_path: Path) -> None:
    config = {"text_config": {"vocab_size": 500, "eos_token_id": [3, 7000, -1]}}
    generation = {"eos_token_id": 9, "temperature": 0.7}
    name = folder(tmp_path, config, generation_config=generation)
    found = read_model_info(name)
    assert found.vocab_size == 500
    assert found.eos_token_ids == (9, 3)
    assert found.sampling == {"temperature": 0.7}


@pytest.mark.parametrize("vocab_size", [None, 0, -1, True, "100", 1 << 40])
def test_no_vocabulary_is_one_line(tmp_path: Path, vocab_size: Any) -> None:
    with pytest.raises(ModelError, match="vocab_size"):
        read_model_info(folder(tmp_path, {"vocab_size": vocab_size}))


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_model_info(str(tmp_path / "none"))
