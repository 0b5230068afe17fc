"""Reads a mixture of experts from `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.engine.families.family import Experts
from moonpool.engine.families.values import number, positive, whole_numbers
from moonpool.engine.spec import ExpertSpec, ModelError


def read_experts(config: Mapping[str, Any], family: Experts, num_layers: int) -> ExpertSpec:
    """The mixture of a config. Raises `ModelError`."""
    # Newer configs have one key for all families.
    count = positive(config, family.count, default=config.get("num_local_experts"))
    per_token = positive(config, "num_experts_per_tok")
    inter = positive(config, family.inter)
    groups, kept, score = _groups(config, family)
    renormalise = family.renormalise
    if renormalise is None:
        renormalise = bool(config.get("norm_topk_prob", family.scores == "sigmoid"))
    if per_token > count // groups * kept or count % groups or kept > groups:
        raise ModelError(
            f"config.json: a token cannot use {per_token} of {count} experts"
            f" in {kept} of {groups} groups"
        )
    if score == "top2" and count // groups < 2:
        raise ModelError(
            f"config.json: {groups} groups of {count} experts have fewer than two experts each"
        )
    shared = inter * (config.get("n_shared_experts") or 0) if family.groups else 0
    if family.shared:
        shared = positive(config, family.shared)
    return ExpertSpec(
        count=count,
        per_token=per_token,
        intermediate_size=inter,
        scores=family.scores,
        renormalise=renormalise,
        factor=number(config, "routed_scaling_factor", 1.0) if family.groups else 1.0,
        groups=groups,
        kept_groups=kept,
        group_score=score,
        correction=bool(family.correction),
        biases=family.biases,
        shared_size=shared,
        shared_gate=bool(family.shared),
        dense_layers=_dense_layers(config, family, num_layers),
    )


def _groups(config: Mapping[str, Any], family: Experts) -> tuple[int, int, str]:
    """The number of groups, how many are kept, and how they are judged."""
    greedy = family.groups == "max" and config.get("topk_method", "greedy") == "greedy"
    if not family.groups or greedy:
        return 1, 1, ""
    groups = positive(config, "n_group", default=1)
    return groups, positive(config, "topk_group", default=1), family.groups if groups > 1 else ""


def _dense_layers(config: Mapping[str, Any], family: Experts, num_layers: int) -> tuple[int, ...]:
    kinds = config.get("mlp_layer_types")
    if family.dense and kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelError(f"config.json: mlp_layer_types names no kind for each of {num_layers}")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if family.dense == "first":
        for every in ("moe_layer_freq", "moe_layer_interval"):
            if config.get(every, 1) != 1:
                raise ModelError(f"config.json: {every} is not 1; only 1 is supported")
        if config.get("moe_layer_end_index", -1) not in (-1, num_layers - 1):
            raise ModelError("config.json: moe_layer_end_index is not the last layer's number")
        return tuple(range(min(config.get("first_k_dense_replace") or 0, num_layers)))
    if family.dense == "step":
        step = positive(config, "decoder_sparse_step", default=1)
        named = whole_numbers(config, "mlp_only_layers") or []
        return tuple(n for n in range(num_layers) if n in named or (n + 1) % step)
    return ()
