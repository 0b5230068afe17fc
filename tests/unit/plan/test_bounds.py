"""Tests that no simulation is better than the computed bounds."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.config.parse import parse_config
from moonpool.config.tables import Config
from moonpool.plan.bounds import Bounds, tokens_of_step
from moonpool.plan.candidate import Candidate, NodeKind
from moonpool.plan.demand import demand_of, truth_for
from moonpool.plan.trial import Trial, Workload, run_trial
from moonpool.sim.defaults import DEFAULTS
from moonpool.trace.builtin import BUILT_IN, CHATS
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.profile import GeneratorProfile
from moonpool.trace.row import TraceRow

A800, H100 = NodeKind("A800-SXM", 8), NodeKind("H100-SXM", 4)
BASE = parse_config("", {}, DEFAULTS)


def bounds(workload: Workload, kind: NodeKind) -> Bounds:
    base = truth_for(BASE, [kind], None)
    return Bounds(workload, base, demand_of(workload, 256))


@pytest.mark.long
@pytest.mark.parametrize(
    ("profile", "kind"), [(BUILT_IN["toolagent"], H100), (CHATS, A800)], ids=("agents", "chats")
)
def test_no_simulation_is_better_than_the_bound(profile: GeneratorProfile, kind: NodeKind) -> None:
    rows = tuple(generate(profile, num_requests=60, seed=4, rate_rps=12.0))
    workload = Workload(rows, BLOCK_TOKENS)
    found, base = bounds(workload, kind), truth_for(BASE, [kind], None)
    for prefill, decode, mixed in ((1, 1, 0), (0, 0, 1), (0, 1, 1)):
        one = Candidate(kind, kind, prefill, decode, mixed, 2_000_000, 512)
        share = run_trial(Trial(one.config(base)), workload).share
        assert share <= found.most_share(one) + 1e-9


def test_too_little_is_excluded_and_enough_is_not() -> None:
    """The workload has a hundred prompts of about a second each, in fifty seconds."""
    rows = tuple(TraceRow(0.5 * i, 16_000, 2, ()) for i in range(200))
    found = bounds(Workload(rows, 0), A800)
    shares = [
        found.most_share(Candidate(A800, A800, n, 1, 0, 1_000_000, 2048)) for n in range(1, 12)
    ]
    assert shares == sorted(shares) and shares[0] < 0.7 and shares[-1] == 1.0
    loads = [found.load(Candidate(A800, A800, n, 1, 0, 1_000_000, 2048)) for n in (1, 2, 4)]
    assert loads[0] == pytest.approx(2 * loads[1]) and loads[1] == pytest.approx(2 * loads[2])


def drafting(method: str, acceptance: float) -> Config:
    """Returns a configuration with at most eight sequences per instance, so that drafts pay."""
    model = ', model = "llama3.2-1b"' if method == "draft_model" else ""
    text = f'''
        [engine]
        max_sequences = 8
        speculative_config = {{ method = "{method}"{model} }}
        [hardware]
        draft_acceptance = {acceptance}
    '''
    return truth_for(
        parse_config(text if method else text.split("spec")[0], {}, DEFAULTS), [A800], None
    )


@pytest.mark.long
@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.long), "draft_model"])
def test_the_bound_counts_drafts(method: str) -> None:
    """A cluster whose drafts are right serves more than plain decoding could, so the bound must be
    higher."""
    rows = tuple(TraceRow(0.4 * i, 600, 200, ()) for i in range(200))
    workload, one = Workload(rows, 0), Candidate(A800, A800, 1, 1, 0, 2_000_000, 512)
    demand = demand_of(workload, 256)
    plain = Bounds(workload, drafting("", 0.0), demand)
    wrong = Bounds(workload, drafting(method, 0.0), demand)
    half = Bounds(workload, drafting(method, 0.5), demand)
    right = Bounds(workload, drafting(method, 1.0), demand)
    assert wrong.load(one) >= plain.load(one) > half.load(one) > right.load(one)
    share = run_trial(Trial(one.config(drafting(method, 1.0))), workload).share
    assert plain.most_share(one) < share <= right.most_share(one) + 1e-9


def test_an_answer_may_be_luckier_than_the_mean_but_not_than_all_right() -> None:
    assert tokens_of_step(0.5, 0, 100) == 1.0
    assert tokens_of_step(1.0, 4, 100) == 5.0
    mean = 1 + 0.5 + 0.25
    assert mean < tokens_of_step(0.5, 2, 1000) < tokens_of_step(0.5, 2, 50) < 3.0
    assert tokens_of_step(0.5, 2, 1) == 3.0


def test_hardware_that_cannot_exist_has_no_bound_above_nothing() -> None:
    rows = (TraceRow(0.0, 100, 2, ()), TraceRow(1.0, 100, 2, ()))
    one = Candidate(A800, NodeKind("A40", 2), 1, 1, 0, 1_000_000, 2048)
    assert bounds(Workload(rows, 0), A800).most_share(one) == 0.0
    assert bounds(Workload(rows, 0), A800).load(msgspec.structs.replace(one)) == float("inf")
