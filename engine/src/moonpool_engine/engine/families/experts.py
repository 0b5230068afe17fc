"""Reads a mixture of experts from `config.json`."""

from __future__ import annotations

from moonpool.text.fields import Fields
from moonpool.text.model_error import LARGEST_EXPERTS
from moonpool_engine.engine.families.family import Experts
from moonpool_engine.engine.spec import ExpertSpec


def read_experts(fields: Fields, family: Experts, num_layers: int) -> ExpertSpec:
    """Returns the mixture of experts that a config describes. Raises `ModelError`."""
    # Newer configs have one key for all families.
    newer = "num_local_experts"
    count = fields.positive(family.count if fields.has(family.count) else newer)
    if count * num_layers > LARGEST_EXPERTS:
        raise fields.error(
            f"{num_layers} layers of {count} experts; at most {LARGEST_EXPERTS} experts in all are"
            " supported"
        )
    per_token = fields.positive("num_experts_per_tok")
    inter = fields.positive(family.inter)
    groups, kept, score = _groups(fields, family)
    renormalise = family.renormalise
    if renormalise is None:
        renormalise = fields.flag("norm_topk_prob", family.scores == "sigmoid")
    if per_token > count // groups * kept or count % groups or kept > groups:
        raise fields.error(
            f"a token cannot use {per_token} of {count} experts in {kept} of {groups} groups"
        )
    if score == "top2" and count // groups < 2:
        raise fields.error(f"{groups} groups of {count} experts have fewer than two experts each")
    shared = inter * fields.count("n_shared_experts", 0) if family.groups else 0
    if family.shared:
        shared = fields.positive(family.shared)
    return ExpertSpec(
        count=count,
        per_token=per_token,
        intermediate_size=inter,
        scores=family.scores,
        renormalise=renormalise,
        factor=fields.number("routed_scaling_factor", 1.0) if family.groups else 1.0,
        groups=groups,
        kept_groups=kept,
        group_score=score,
        correction=bool(family.correction),
        biases=family.biases,
        shared_size=shared,
        shared_gate=bool(family.shared),
        dense_layers=_dense_layers(fields, family, num_layers),
    )


def _groups(fields: Fields, family: Experts) -> tuple[int, int, str]:
    """Returns the number of expert groups, how many of them are chosen, and how groups are
    scored."""
    greedy = family.groups == "max" and fields.text("topk_method", "greedy") == "greedy"
    if not family.groups or greedy:
        return 1, 1, ""
    groups = fields.positive("n_group", default=1)
    return groups, fields.positive("topk_group", default=1), family.groups if groups > 1 else ""


def _dense_layers(fields: Fields, family: Experts, num_layers: int) -> tuple[int, ...]:
    kinds = fields.texts("mlp_layer_types") if family.dense else None
    if kinds is not None:
        if len(kinds) != num_layers:
            raise fields.error(f"mlp_layer_types names no kind for each of {num_layers}")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if family.dense == "first":
        for every in ("moe_layer_freq", "moe_layer_interval"):
            if fields.count(every, 1) != 1:
                raise fields.error(f"{every} is not 1; only 1 is supported")
        if fields.count("moe_layer_end_index", -1, least=-1) not in (-1, num_layers - 1):
            raise fields.error("moe_layer_end_index is not the last layer's number")
        return tuple(range(min(fields.count("first_k_dense_replace", 0), num_layers)))
    if family.dense == "step":
        step = fields.positive("decoder_sparse_step", default=1)
        named = set(fields.whole_numbers("mlp_only_layers") or ())
        return tuple(n for n in range(num_layers) if n in named or (n + 1) % step)
    return ()
