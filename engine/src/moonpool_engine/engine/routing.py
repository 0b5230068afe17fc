"""Which experts compute a row, and with which weights.

The module uses only operations on single elements, maxima, and sums in a fixed order, so that a row
is routed alike in every batch and at every place in a tensor. Ties go to the lowest expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool_engine.engine.exponential import exp, sigmoid
from moonpool_engine.engine.spec import ExpertSpec


def route(logits: Tensor, spec: ExpertSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits [T, experts] float32 -> the chosen experts [T, k] int64, best first, and their weights
    [T, k] float32. correction: [experts] float32."""
    scores = _scores(logits, spec)
    judged = scores if correction is None else scores + correction
    if spec.groups > 1:
        judged = judged.masked_fill(~_in_kept_groups(judged, spec), -torch.inf)
    chosen = _best(judged, spec.per_token)
    weights = scores.gather(1, chosen)
    if spec.scores == "chosen":
        weights = exp(weights - weights[:, :1])
    if spec.renormalise or spec.scores == "chosen":
        total = weights[:, 0]
        for column in weights.unbind(1)[1:]:
            total = total + column
        weights = weights / total.unsqueeze(1)
    return chosen, weights * spec.factor


def _scores(logits: Tensor, spec: ExpertSpec) -> Tensor:
    if spec.scores == "sigmoid":
        return sigmoid(logits)
    if spec.scores == "chosen":
        return logits
    weights = exp(logits - logits.amax(1, keepdim=True))
    return weights / _sum(weights)


def _sum(x: Tensor) -> Tensor:
    """[T, n] -> [T, 1]: halves are added until one column is left."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        halves = x[:, :half] + x[:, half : 2 * half]
        x = torch.cat((halves, x[:, 2 * half :]), dim=1)
    return x


def _best(x: Tensor, count: int) -> Tensor:
    """The columns of the highest values in each row, [T, count]: of equals the first."""
    return x.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _in_kept_groups(judged: Tensor, spec: ExpertSpec) -> Tensor:
    """[T, experts] bool: the experts of the best groups."""
    grouped = judged.unflatten(1, (spec.groups, -1))
    if spec.group_score == "top2":
        best = grouped.sort(dim=2, descending=True).values
        group_scores = best[..., 0] + best[..., 1]
    else:
        group_scores = grouped.amax(2)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(1, _best(group_scores, spec.kept_groups), True)
    return kept.repeat_interleave(judged.shape[1] // spec.groups, dim=1)
