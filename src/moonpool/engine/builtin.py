"""Which models there are by name, and the one door to them and to checkpoints: `open_model`.

Built in are `moonpool/induction` (the default, see `engine.induction`) and `random:...` (see
`engine.random_weights`); anything else is a folder or a Hugging Face id (see `engine.checkpoint`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from moonpool.engine import induction
from moonpool.engine.checkpoint import open_checkpoint, sampling_defaults
from moonpool.engine.induction import InductionWeights
from moonpool.engine.model import Weights
from moonpool.engine.random_weights import PREFIX, RandomWeights, random_spec
from moonpool.engine.spec import ModelError, ModelSpec

logger = logging.getLogger(__name__)

DEFAULT_MODEL = induction.NAME
BYTE_TOKENIZER = "bytes"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be packed by an engine.

    fingerprint: names what is computed, whatever the dtype; equal in every process.
    tokenizer: `BYTE_TOKENIZER` (bytes 0..255, then bos 256, eos 257, pad 258), or the folder whose
    tokeniser files go with the weights.
    sampling: how tokens are drawn where a request does not say, by the names of `SamplingParams`.
    """

    name: str
    spec: ModelSpec
    weights: Weights
    dtype: str
    fingerprint: str
    tokenizer: str
    sampling: Mapping[str, float] = field(default_factory=dict)


def open_model(name: str, dtype: str) -> LoadedModel:
    """Opens a built-in model, a checkpoint folder or a Hugging Face id. Raises `ModelError`.

    dtype: "float32" or "bfloat16". Weights are read or made only when an engine packs them.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported: use one of {', '.join(DTYPES)}")
    wanted = DTYPES[dtype]
    if name == DEFAULT_MODEL:
        constructed = InductionWeights(wanted)
        fingerprint = constructed.fingerprint
        return LoadedModel(name, induction.SPEC, constructed, dtype, fingerprint, BYTE_TOKENIZER)
    if name.startswith(PREFIX):
        spec, seed = random_spec(name)
        drawn = RandomWeights(spec, seed, wanted)
        return LoadedModel(name, spec, drawn, dtype, drawn.fingerprint, BYTE_TOKENIZER)
    checkpoint = open_checkpoint(name, wanted)
    for note in checkpoint.spec.notes:
        logger.warning("model %s: %s", name, note)
    folder = checkpoint.folder
    sampling = sampling_defaults(folder)
    return LoadedModel(
        name,
        checkpoint.spec,
        checkpoint.weights,
        dtype,
        checkpoint.fingerprint,
        str(folder),
        sampling,
    )
