"""Tests that the kernels repack quantized weights like the plain code, byte for byte."""

from __future__ import annotations

import pytest
import torch

from moonpool_engine.engine import native
from moonpool_engine.engine.native.linear import PackedMemory
from moonpool_engine.engine.native.quantized import REPACKED, packed_rows, repacked
from moonpool_engine.engine.quantized.formats import FORMATS
from moonpool_engine.engine.quantized.matrix import StoredRows
from tests.unit.engine.gguf_files import random_groups


@pytest.mark.parametrize("out", [1, 32, 45])
@pytest.mark.parametrize("name", REPACKED)
def test_the_same_bytes(name: str, out: int) -> None:
    missing = native.available()
    if missing is not None:
        pytest.skip(missing)
    from moonpool_engine.engine.native.library import open_kernels

    repack = open_kernels()[1][torch.float32].repack
    format = FORMATS[name]
    groups = 3 if format.group == 256 else 24
    data = torch.from_numpy(random_groups(format, out * groups, seed=out)).view(out, -1)
    rows = StoredRows(format, data)
    assert torch.equal(repacked(rows, PackedMemory(), repack), packed_rows(rows, PackedMemory()))
