"""Model shapes in other number formats: `model.quantization` and `model.kv_cache_dtype`.

The bytes are those of our own formats: int4 has a scale and a minimum of two bytes per 32 weights,
int8 a scale of four bytes per 256, and FP8 KVCache a byte of scale per token, head, K and V.
Embedding and LM head keep their format, as published checkpoints have them.
"""

from __future__ import annotations

from msgspec import structs

from moonpool.config.tables import ModelConfig
from moonpool.protocol.block_layout import FP8
from moonpool.sim.hardware.model_shapes import ModelShape

WEIGHT_BYTES = {"int4": 0.5 + 4 / 32, "int8": 1.0 + 4 / 256, "fp8": 1.0}


def is_plain(model: ModelConfig) -> bool:
    """Whether weights and KVCache have the formats of the shape itself."""
    return model.quantization == "none" and model.kv_cache_dtype == "auto"


def in_formats(shape: ModelShape, model: ModelConfig) -> ModelShape:
    """The shape with weights and KVCache as `model` asks. Weights that are smaller stay so."""
    if model.kv_cache_dtype == FP8:
        shape = structs.replace(shape, bytes_per_kv=1.0 + 1.0 / shape.head_dim)
    if model.quantization == "none":
        return shape
    each, mixture = WEIGHT_BYTES[model.quantization], shape.experts
    if mixture is not None and mixture.bytes_per_weight:
        smaller = min(mixture.bytes_per_weight, each)
        mixture = structs.replace(mixture, bytes_per_weight=smaller)
    return structs.replace(
        shape,
        bytes_per_weight=min(shape.bytes_per_weight, each),
        bytes_per_embedding=shape.bytes_per_embedding or shape.bytes_per_weight,
        fp8_products=model.quantization == "fp8" or (shape.fp8_products and each >= 1.0),
        experts=mixture,
    )
