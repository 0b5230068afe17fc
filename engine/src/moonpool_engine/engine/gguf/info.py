"""Reads what a head needs of a GGUF file: the config, from the header alone. This module imports no
torch.

The readers of tensors check them (`gguf.checkpoint`).
"""

from __future__ import annotations

from pathlib import Path

from moonpool.text.model_info import ModelInfo
from moonpool_engine.engine.families.config import parse_config
from moonpool_engine.engine.gguf.config import hf_config, pooling_of
from moonpool_engine.engine.gguf.delta import with_stored_heads
from moonpool_engine.engine.gguf.reader import GgufFile, read_gguf
from moonpool_engine.engine.spec import ModelSpec


def gguf_info(path: Path) -> ModelInfo:
    """Returns the info of a model in a GGUF file. Raises `ModelError`."""
    file = read_gguf(path)
    spec = gguf_spec(file)
    return ModelInfo(
        spec.vocab_size,
        spec.eos_token_ids,
        spec.max_positions,
        str(path),
        notes=tuple(spec.notes),
        hidden_size=spec.hidden_size,
        pooling=pooling_of(file),
    )


def gguf_spec(file: GgufFile) -> ModelSpec:
    """The model's sizes, by the metadata. Raises `ModelError`."""
    return with_stored_heads(parse_config(hf_config(file), str(file.path)))
