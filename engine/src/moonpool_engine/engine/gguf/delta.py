"""Reads what only GGUF files of Qwen3.5 have: the sizes and tensors of linear attention, and q with
its gate in one tensor.

llama.cpp's converter stores value heads in turns by key head, and -exp(A_log) for A_log.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.families.stored import Shape
from moonpool_engine.engine.gguf.tensor_location import TensorLocation
from moonpool_engine.engine.gguf.values import MetadataValues
from moonpool_engine.engine.spec import ModelSpec

_LAYER_NAMES = {
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
_VECTORS = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}
_HALVES = {"self_attn.q_proj": 0, "self_attn.g_proj": 1}


def delta_config(values: MetadataValues) -> dict[str, Any]:
    """The keys of `config.json` that only these have. Raises `ModelError`."""
    value_heads, width = values.count("ssm.time_step_rank"), values.count("ssm.inner_size")
    if width % value_heads:
        raise ModelError(
            f"{values.path}: ssm.inner_size {width} is no multiple of ssm.time_step_rank"
            f" {value_heads}"
        )
    return {
        "linear_num_key_heads": values.count("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": values.count("ssm.state_size"),
        "linear_value_head_dim": width // value_heads,
        "linear_conv_kernel_dim": values.count("ssm.conv_kernel"),
        "full_attention_interval": values.count("full_attention_interval", 4),
        "shared_expert_intermediate_size": values.optional_count(
            "expert_shared_feed_forward_length"
        ),
    }


def with_stored_heads(spec: ModelSpec) -> ModelSpec:
    """The spec with value heads as a file has them."""
    return spec if spec.delta is None else replace(spec, delta=replace(spec.delta, tiled=True))


def delta_place(
    spec: ModelSpec, prefix: str, part: str, kind: str, shape: Shape
) -> TensorLocation | None:
    """Returns where a file has a layer's tensor `part`.`kind`, or None for tensors of other
    families."""
    if part in _HALVES:
        stored_shape = (2 * shape[0], shape[1])
        return TensorLocation(f"{prefix}attn_q.{kind}", stored_shape, shape, half=_HALVES[part])
    if part == "mlp.shared_gate":
        return TensorLocation(f"{prefix}ffn_gate_inp_shexp.{kind}", shape[1:], shape)
    if kind in _VECTORS:
        return TensorLocation(f"{prefix}{_VECTORS[kind]}", shape, shape)
    if part.startswith("linear_attn."):
        return TensorLocation(
            f"{prefix}{_LAYER_NAMES[part.partition('.')[2]]}.{kind}", shape, shape
        )
    return None
