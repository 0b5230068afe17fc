"""The choice of device, dtype and GPU operations, and the free memory of the GPU."""

from __future__ import annotations

import importlib.util
import logging
from typing import Protocol

import torch
from torch import Tensor

from moonpool_engine.engine.cuda.torch_ops import TorchOps
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.ops import KvCache, Ops, StepMeta
from moonpool_engine.engine.step import BeforeAttend, LayerDone

logger = logging.getLogger(__name__)


class DeviceError(ValueError):
    """The device cannot be used here; the message is one line with the reason and the remedy."""


def resolve_device(wanted: str) -> str:
    """ "auto" becomes "cuda" where torch finds a GPU, else "cpu"."""
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raises `DeviceError` where the device cannot be used."""
    if device == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda is not None
        why = "sees no GPU: check `nvidia-smi`" if built else "was built without CUDA"
        raise DeviceError(f"engine.device is cuda, but the torch here {why}; or use --device cpu")


def stage_device(device: str, stage: int) -> str:
    """Assigns the visible GPUs to stages in turn, from the first stage on."""
    return f"cuda:{stage % torch.cuda.device_count()}" if device == "cuda" else device


def stages_of_fullest(num_stages: int) -> int:
    """The largest number of an instance's stages on one GPU."""
    return -(-num_stages // torch.cuda.device_count())


def choose_device_ops(device: torch.device) -> Ops:
    """The batch-invariant Triton kernels, or torch's own where Triton is missing.

    torch's kernels are not batch-invariant. The call also makes `device` this thread's current one.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from moonpool_engine.engine.cuda.triton_ops import TritonOps

        return TritonOps(device)
    logger.warning("the GPU runs torch's kernels, as triton is not installed: tokens may differ")
    return TorchOps(device)


class Model(Protocol):
    """The model interface of the engine; see `DecoderModel.forward`."""

    def forward(
        self,
        token_ids: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> Tensor | None: ...


def with_graphs(model: DecoderModel, ops: Ops) -> Model:
    """With Triton operations, returns a model whose decode steps run as CUDA graphs; else the
    model."""
    if ops.name != "triton":
        return model
    from moonpool_engine.engine.cuda.graphs import GraphedModel
    from moonpool_engine.engine.cuda.triton_ops import TritonOps

    assert isinstance(ops, TritonOps)
    return GraphedModel(model, ops)


def free_bytes() -> int:
    """Free bytes of the current GPU's memory."""
    return int(torch.cuda.mem_get_info()[0])


def resolve_dtype(wanted: str, device: str = "cpu") -> str:
    """ "auto" becomes bfloat16 where the device multiplies it natively, else float32.

    Without native support bfloat16 is slower than float32 and less exact.
    """
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bfloat16"
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    native = any(getattr(torch.cpu, name, lambda: False)() for name in probes)
    return "bfloat16" if native else "float32"
