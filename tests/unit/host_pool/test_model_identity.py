"""A model is identified by its content."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from moonpool_engine.vllm.model_identity import (
    UnknownModelError,
    group_of,
    hash_folder,
    model_folder,
    settings_of,
)


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checkpoint(folder: Path, weights: bytes = b"abc", config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("[]")
    return folder


def test_names_and_times_do_not_count(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a")
    second = Path(shutil.copytree(first, tmp_path / "b"))
    (second / "tokenizer.json").write_text("[1]")
    assert hash_folder(first) == hash_folder(second)


def test_weights_and_settings_count(tmp_path: Path) -> None:
    hashes = {
        hash_folder(checkpoint(tmp_path / "a")),
        hash_folder(checkpoint(tmp_path / "b", weights=b"abd")),
        hash_folder(checkpoint(tmp_path / "c", config='{"a": 1}')),
    }
    assert len(hashes) == 3


def test_a_file_that_changed_is_hashed_again(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a")
    before = hash_folder(folder)
    (folder / "model.safetensors").write_bytes(b"xyz!")
    assert hash_folder(folder) != before
    (tmp_path / "cache" / "moonpool" / "weights.json").write_text("damaged")
    (folder / "model.safetensors").write_bytes(b"abc")
    assert hash_folder(folder) == before


def test_what_has_no_weights_is_unknown(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnknownModelError, match="has no weights"):
        hash_folder(folder)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder)),
        load_config=SimpleNamespace(load_format="dummy"),
    )
    with pytest.raises(UnknownModelError, match="random"):
        model_folder(config)


SMALL_IMAGES = SimpleNamespace(mm_processor_kwargs={"max_pixels": 4096})


def settings(
    max_len: int = 10, dtype: str = "bf16", rope: str = "default", **more: object
) -> list[object]:
    hf = SimpleNamespace(to_dict=lambda: {"rope_scaling": {"type": rope}})
    return settings_of(
        SimpleNamespace(
            model_config=SimpleNamespace(hf_config=hf, dtype=dtype, max_model_len=max_len, **more),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        ),
        16,
        "0.32",
    )


def test_groups_differ_where_blocks_do() -> None:
    assert settings() == settings(max_len=20)
    assert settings(rope="longrope") != settings(rope="longrope", max_len=20)
    groups = {
        group_of("w", settings(), "l"),
        group_of("v", settings(), "l"),
        group_of("w", settings(dtype="fp16"), "l"),
        group_of("w", settings(), "m"),
        group_of("w", settings(quantization_config={"ignore": ["lm_head"]}), "l"),
        group_of("w", settings(multimodal_config=SMALL_IMAGES), "l"),
    }
    assert len(groups) == 6
    assert all(len(group) == 32 for group in groups)
