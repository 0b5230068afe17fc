"""Reads layers of linear attention (Gated DeltaNet) from `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.engine.families.values import positive
from moonpool.engine.spec import DeltaSpec, ModelError

DELTA_MULTIPLE = 16
MOST_TAPS = 8


def read_delta(config: Mapping[str, Any]) -> DeltaSpec:
    """The linear attention of a config. Raises `ModelError`."""
    delta = DeltaSpec(
        key_heads=positive(config, "linear_num_key_heads", default=16),
        value_heads=positive(config, "linear_num_value_heads", default=32),
        key_dim=positive(config, "linear_key_head_dim", default=128),
        value_dim=positive(config, "linear_value_head_dim", default=128),
        taps=positive(config, "linear_conv_kernel_dim", default=4),
    )
    if config.get("attention_bias"):
        raise ModelError("config.json: attention_bias is true; only false is supported here")
    if config.get("attn_output_gate", True) is not True:
        raise ModelError("config.json: attn_output_gate is not true; only true is supported")
    if delta.value_heads % delta.key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {delta.value_heads} is no multiple of"
            f" linear_num_key_heads {delta.key_heads}"
        )
    for name, size in (("key", delta.key_dim), ("value", delta.value_dim)):
        if size % DELTA_MULTIPLE or size > 256:
            raise ModelError(
                f"config.json: linear_{name}_head_dim {size}; only multiples of {DELTA_MULTIPLE}"
                " up to 256 are supported"
            )
    if not 2 <= delta.taps <= MOST_TAPS:
        raise ModelError(
            f"config.json: linear_conv_kernel_dim {delta.taps}; only 2 to {MOST_TAPS} are supported"
        )
    return delta


def delta_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers that have it. Raises `ModelError`."""
    kinds = config.get("layer_types")
    if kinds is None:
        every = positive(config, "full_attention_interval", default=4)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every)
    known = {"linear_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(map(str, kinds)) - known:
        raise ModelError(
            f"config.json: layer_types names none of {', '.join(sorted(known))} for each of"
            f" {num_layers} layers"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
