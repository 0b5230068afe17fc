"""Tests routing: ties, groups and weights, and the same choice for a row in any batch."""

from __future__ import annotations

import torch

from moonpool_engine.engine.routing import route
from moonpool_engine.engine.spec import ExpertSpec


def test_ties_go_to_the_lowest_expert() -> None:
    spec = ExpertSpec(count=6, per_token=3, intermediate_size=1)
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0], [0.0] * 6])
    chosen, weights = route(logits, spec, None)
    assert chosen.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert torch.allclose(weights.sum(1), torch.ones(2))
    assert weights[1].unique().numel() == 1


def test_a_row_is_routed_alike_among_any_others() -> None:
    spec = ExpertSpec(60, 8, 1, "softmax", renormalise=False)
    logits = torch.randn(37, 60, generator=torch.Generator().manual_seed(0)) * 3
    chosen, weights = route(logits, spec, None)
    exact = logits.double().softmax(1).gather(1, chosen)
    assert (weights - exact).abs().max() < 1e-6
    for first, end in ((0, 1), (36, 37), (5, 20)):
        own = route(logits[first:end].clone(), spec, None)
        assert torch.equal(own[0], chosen[first:end])
        assert torch.equal(own[1], weights[first:end])


def test_a_correction_counts_in_the_choice_but_not_in_the_weight() -> None:
    spec = ExpertSpec(4, 2, 1, "sigmoid", renormalise=False, factor=2.5)
    correction = torch.tensor([0.0, 0.0, 0.0, 1.0])
    chosen, weights = route(torch.tensor([[3.0, 2.0, 1.0, -1.0]]), spec, correction)
    assert chosen.tolist() == [[3, 0]]
    assert torch.allclose(weights, 2.5 * torch.tensor([[-1.0, 3.0]]).sigmoid())


def test_only_the_best_groups_are_chosen_from() -> None:
    logits = torch.tensor([[9.0, 0.0, 5.0, 5.0, 4.0, 4.5, 8.0, 0.0]])
    best = ExpertSpec(8, 2, 1, groups=4, kept_groups=1, group_score="max")
    assert route(logits, best, None)[0].tolist() == [[0, 1]]
    # With logistic scores, the second group has the best two experts.
    two = ExpertSpec(8, 2, 1, "sigmoid", groups=4, kept_groups=1, group_score="top2")
    assert route(logits, two, None)[0].tolist() == [[2, 3]]
