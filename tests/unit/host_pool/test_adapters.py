"""Tests the fingerprints of LoRA adapters: an adapter whose files have changed has no fingerprint
until vLLM has loaded it again."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool_engine.vllm.adapters import Adapters
from moonpool_engine.vllm.prompt_keys import PromptKeys

LOG = "moonpool.vllm_connector"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOG]


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapter(folder: Path, weights: bytes = b"abc") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def lora(folder: Path, number: int = 1) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_path=str(folder))


def test_content_is_that_of_the_files_and_the_settings(tmp_path: Path) -> None:
    first, same = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    other = adapter(tmp_path / "c", b"abd")
    found = [Adapters("").content_of(lora(folder)) for folder in (first, same, other)]
    assert found[0] == found[1] != found[2]
    assert Adapters("['q_proj']").content_of(lora(first)) not in (*found, None)


def test_files_that_change_under_a_running_vllm_end_an_adapters_use_of_the_pool(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, adapters = adapter(tmp_path / "a"), Adapters("")
    request = SimpleNamespace(all_token_ids=list(range(8)), lora_request=lora(folder))
    begun = PromptKeys(request, 4, adapters.content_of)
    assert len(begun.extend(1)) == 1
    assert begun.is_known
    adapter(folder, b"abd!")
    with caplog.at_level(logging.WARNING, LOG):
        assert not begun.is_known  # blocks that were computed since may be the new adapter's
        assert adapters.content_of(lora(folder)) is None
    assert [line.count("have changed") for line in said(caplog)] == [1]
    assert PromptKeys(request, 4, adapters.content_of).extend(2) == []
    # the adapter was loaded again, under another number
    assert adapters.content_of(lora(folder, 2)) is not None


def test_an_adapter_that_cannot_be_read_has_no_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = Adapters("")
    with caplog.at_level(logging.WARNING, LOG):
        for _ in range(2):
            assert adapters.content_of(lora(tmp_path / "nowhere")) is None
    (line,) = said(caplog)
    assert "are not on this machine" in line
