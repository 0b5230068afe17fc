"""Which GPU there is, how much of it is free, and which operations to run on it."""

from __future__ import annotations

import importlib.util
import logging
from typing import Protocol

import torch
from torch import Tensor

from moonpool.engine.cuda.torch_ops import TorchOps
from moonpool.engine.model import DecoderModel
from moonpool.engine.ops import KvCache, Ops, StepMeta
from moonpool.engine.step import BeforeAttend, LayerDone

logger = logging.getLogger(__name__)


class DeviceError(ValueError):
    """There is no such device here; one line says why and what to do."""


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
    """Stages take the GPUs that are visible in turn, the first stage the first."""
    return f"cuda:{stage % torch.cuda.device_count()}" if device == "cuda" else device


def stages_of_fullest(num_stages: int) -> int:
    """How many of an instance's stages share the GPU that most of them share."""
    return -(-num_stages // torch.cuda.device_count())


def choose_device_ops(device: torch.device) -> Ops:
    """Own kernels, by which rows do not see each other; torch's, which do not promise it, where
    Triton is missing. The device becomes this thread's own: kernels run on that."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from moonpool.engine.cuda.triton_ops import TritonOps

        return TritonOps(device)
    logger.warning("the GPU runs torch's kernels, as triton is not installed: tokens may differ")
    return TorchOps(device)


class Model(Protocol):
    """What the engine asks of a model."""

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
    """Where the operations allow it, a model whose decode steps are recorded once and replayed."""
    if ops.name != "triton":
        return model
    from moonpool.engine.cuda.graphs import GraphedModel
    from moonpool.engine.cuda.triton_ops import TritonOps

    assert isinstance(ops, TritonOps)
    return GraphedModel(model, ops)


def free_bytes() -> int:
    """Memory of the GPU that nobody has taken."""
    return int(torch.cuda.mem_get_info()[0])
