"""Reads layers of linear attention (Gated DeltaNet) from `config.json`."""

from __future__ import annotations

from moonpool.text.fields import Fields
from moonpool_engine.engine.spec import DeltaSpec

DELTA_MULTIPLE = 16
MOST_TAPS = 8


def read_delta(fields: Fields) -> DeltaSpec:
    """Returns the linear attention that a config describes. Raises `ModelError`."""
    delta = DeltaSpec(
        key_heads=fields.positive("linear_num_key_heads", default=16),
        value_heads=fields.positive("linear_num_value_heads", default=32),
        key_dim=fields.positive("linear_key_head_dim", default=128),
        value_dim=fields.positive("linear_value_head_dim", default=128),
        taps=fields.positive("linear_conv_kernel_dim", default=4),
    )
    if fields.flag("attention_bias"):
        raise fields.error("attention_bias is true; only false is supported here")
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate is not true; only true is supported")
    if delta.value_heads % delta.key_heads:
        raise fields.error(
            f"linear_num_value_heads {delta.value_heads} is no multiple of"
            f" linear_num_key_heads {delta.key_heads}"
        )
    for name, size in (("key", delta.key_dim), ("value", delta.value_dim)):
        if size % DELTA_MULTIPLE or size > 256:
            raise fields.error(
                f"linear_{name}_head_dim {size}; only multiples of {DELTA_MULTIPLE}"
                " up to 256 are supported"
            )
    if not 2 <= delta.taps <= MOST_TAPS:
        raise fields.error(
            f"linear_conv_kernel_dim {delta.taps}; only 2 to {MOST_TAPS} are supported"
        )
    return delta


def delta_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers that have it. Raises `ModelError`."""
    kinds = fields.texts("layer_types")
    if kinds is None:
        every = fields.positive("full_attention_interval", default=4)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every)
    known = {"linear_attention", "full_attention"}
    if len(kinds) != num_layers or set(kinds) - known:
        raise fields.error(
            f"layer_types names none of {', '.join(sorted(known))} for each of {num_layers} layers"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
