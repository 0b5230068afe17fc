"""Reads attention over latents (MLA) from `config.json`."""

from __future__ import annotations

from moonpool.text.fields import Fields
from moonpool_engine.engine.families.rope import mscale
from moonpool_engine.engine.spec import LatentSpec, RopeSpec

LATENT_MULTIPLE = 16


def read_latent(fields: Fields) -> LatentSpec:
    """Returns the latent that a DeepSeek config describes. Raises `ModelError`."""
    latent = LatentSpec(
        rank=fields.positive("kv_lora_rank"),
        rope_dim=fields.positive("qk_rope_head_dim"),
        nope_dim=fields.positive("qk_nope_head_dim"),
        value_dim=fields.positive("v_head_dim"),
        query_rank=fields.count("q_lora_rank", 0),
        interleaved=fields.flag("rope_interleave", True),
    )
    for name, value in (("kv_lora_rank", latent.rank), ("qk_rope_head_dim", latent.rope_dim)):
        if value % LATENT_MULTIPLE:
            raise fields.error(f"{name} {value}; only multiples of {LATENT_MULTIPLE} are supported")
    return latent


def latent_scale(latent: LatentSpec, rope: RopeSpec) -> float:
    """The factor of the scores, with YaRN's correction."""
    scale: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    if rope.kind == "default" or not rope.mscale_all_dim:
        return scale
    return scale * mscale(rope.factor, rope.mscale_all_dim) ** 2
