"""The kernels arrange quantized weights as the plain code does, byte for byte."""

from __future__ import annotations

import pytest
import torch

from moonpool.engine import native
from moonpool.engine.native.linear import PackedMemory
from moonpool.engine.native.quantized import _REPACKED, _repacked, packed_rows
from moonpool.engine.quantized.formats import FORMATS
from moonpool.engine.quantized.matrix import StoredRows
from tests.unit.engine.gguf_files import random_groups


@pytest.mark.parametrize("out", [1, 32, 45])
@pytest.mark.parametrize("name", _REPACKED)
def test_the_same_bytes(name: str, out: int) -> None:
    missing = native.available()
    if missing is not None:
        pytest.skip(missing)
    from moonpool.engine.native.library import open_kernels

    repack = open_kernels()[1][torch.float32].repack
    format = FORMATS[name]
    groups = 3 if format.group == 256 else 24
    data = torch.from_numpy(random_groups(format, out * groups, seed=out)).view(out, -1)
    rows = StoredRows(format, data)
    assert torch.equal(_repacked(rows, PackedMemory(), repack), packed_rows(rows, PackedMemory()))
