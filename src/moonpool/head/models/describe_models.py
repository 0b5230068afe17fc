"""Describes all models of a head as one cluster, as plain JSON values for the HTTP endpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from moonpool.head.explain import describe_cluster, describe_to_tenant
from moonpool.head.models.served_model import ServedModel

_OF_MODEL = ("role_balance", "predictions", "longest_gaps_over_mean", "late_ttft_over_predicted")
"""The parts of the description that are about one model's instances."""
_OF_EACH = ("lack", "requests_under_way", "requests_waiting", "programs")
_SUMS = ("answers_paused", "requests_under_way", "requests_waiting", "indexed_blocks")


def describe_models(models: Sequence[ServedModel], now: float) -> dict[str, Any]:
    """Like `describe_cluster`. Parts about one model are those of the first model; `models` has
    them for each."""
    each = [describe_cluster(model.conductor, now) for model in models]
    described = _together(models, each)
    described["drains"] = {
        name: sum(one["drains"][name] for one in each) for name in ("left", "handed_over_blocks")
    }
    programs: Counter[str] = Counter()
    for one in each:
        programs.update(one["programs"])  # keeps those of 0
    described["programs"] = dict(programs)
    described |= {name: each[0][name] for name in _OF_MODEL} if each else {}
    described["models"] = [
        {"name": model.card.model_id, "root": model.card.root}
        | {name: one[name] for name in (*_OF_MODEL, *_OF_EACH)}
        for model, one in zip(models, each, strict=True)
    ]
    return described


def describe_models_to_tenant(models: Sequence[ServedModel], tenant: str) -> dict[str, Any]:
    return _together(models, [describe_to_tenant(model.conductor, tenant) for model in models])


def _together(models: Sequence[ServedModel], each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    instances = [
        instance | {"model": model.card.model_id}
        for model, one in zip(models, each, strict=True)
        for instance in one["instances"]
    ]
    sums = {name: sum(one.get(name, 0) for one in each) for name in _SUMS}
    return {"instances": instances} | {
        name: total for name, total in sums.items() if not each or name in each[0]
    }
