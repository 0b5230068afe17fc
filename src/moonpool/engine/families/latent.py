"""Reads attention over latents (MLA) from `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.engine.families.values import positive
from moonpool.engine.rope import mscale
from moonpool.engine.spec import LatentSpec, ModelError, RopeSpec

LATENT_MULTIPLE = 16


def read_latent(config: Mapping[str, Any]) -> LatentSpec:
    """The latent of a DeepSeek config. Raises `ModelError`."""
    latent = LatentSpec(
        rank=positive(config, "kv_lora_rank"),
        rope_dim=positive(config, "qk_rope_head_dim"),
        nope_dim=positive(config, "qk_nope_head_dim"),
        value_dim=positive(config, "v_head_dim"),
        query_rank=positive(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
        interleaved=bool(config.get("rope_interleave", True)),
    )
    for name, value in (("kv_lora_rank", latent.rank), ("qk_rope_head_dim", latent.rope_dim)):
        if value % LATENT_MULTIPLE:
            raise ModelError(
                f"config.json: {name} {value}; only multiples of {LATENT_MULTIPLE} are supported"
            )
    return latent


def latent_scale(latent: LatentSpec, rope: RopeSpec) -> float:
    """The factor of the scores, with YaRN's correction."""
    scale: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    if rope.kind == "default" or not rope.mscale_all_dim:
        return scale
    return scale * mscale(rope.factor, rope.mscale_all_dim) ** 2
