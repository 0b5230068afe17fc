"""Tests the processes of attention workers that a measurement starts."""

from __future__ import annotations

import shutil
import sys
from typing import Any, cast

import pytest

from moonpool_engine.attention_offload.client import AttentionError
from moonpool_lab.profiling.attention_group import open_attention_group


def test_a_worker_that_ends_as_it_starts_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_at_once = shutil.which("false")
    assert ends_at_once is not None
    monkeypatch.setattr(sys, "executable", ends_at_once)
    anything = cast(Any, None)
    with (
        pytest.raises(AttentionError, match="attention worker 0 ended as it started"),
        open_attention_group(anything, anything, num_workers=1, each=1),
    ):
        pass
