"""The choice of GPU operations, and the free memory of the GPU."""

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
