"""Tests the automatic choice of device and dtype, and the error without a GPU."""

from __future__ import annotations

import pytest
import torch

from moonpool.config.parse import parse_config
from moonpool.head.cluster_error import ClusterError
from moonpool.head.serving import resolved
from moonpool_engine.engine.cuda.torch_ops import TorchOps
from moonpool_engine.engine.device_choice import (
    DeviceError,
    check_device,
    resolve_device,
    resolve_dtype,
)
from moonpool_engine.engine.runner import choose_ops


def test_auto_takes_the_gpu_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda" and resolve_device("cpu") == "cpu"
    check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu" and resolve_device("cuda") == "cuda"
    check_device("cpu")


@pytest.mark.parametrize(("built", "says"), [(None, "without CUDA"), ("13.0", "nvidia-smi")])
def test_a_missing_gpu_is_one_line(
    monkeypatch: pytest.MonkeyPatch, built: str | None, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(DeviceError, match=says) as caught:
        check_device("cuda")
    assert "--device cpu" in str(caught.value) and "\n" not in str(caught.value)


def test_a_gpu_computes_in_bfloat16_unless_asked_otherwise() -> None:
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    assert resolve_dtype("float32", "cuda") == "float32"


def test_without_triton_torch_s_operations_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(choose_ops("bfloat16", "meta"), TorchOps)
    assert not isinstance(choose_ops("float32", "cpu"), TorchOps)


def test_what_does_not_go_with_the_gpu_that_was_found_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_config('[engine]\ndevice = "auto"\ntensor_parallel_size = 2\n')
    assert resolved(config).engine.device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ClusterError, match="tensor_parallel_size must be 1 while"):
        resolved(config)
