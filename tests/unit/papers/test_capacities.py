"""Tests capacities within SLOs and tokens per dollar: their inputs, and their computation."""

from __future__ import annotations

import pytest

from moonpool.trace.generate import BLOCK_TOKENS
from papers.finding import Finding
from papers.lamina import dollars
from papers.lamina.runs import USD_PER_H
from papers.mooncake import v3_capacity
from papers.mooncake.v3_capacity import MOONCAKE, VLLM, Claim, LimitedRates, claim_rows
from papers.mooncake.v3_datasets import ARXIV_SUM, L_EVAL, SIMULATED, DataSet
from papers.mooncake.workload import MooncakeWorkload
from papers.options import Options
from papers.sarathi import serve_capacity
from papers.sarathi.serve_budgets import DEPLOYMENTS
from papers.sarathi.serve_capacity import KINDS, Capacities, at_rate, delays_s
from papers.sarathi.serve_workload import CHAT
from papers.single_instance import SoloConfig, SoloRequest, serve


def reused_share(workload: MooncakeWorkload) -> float:
    """Returns the share of prompt tokens that are in a prefix that an earlier prompt had, too."""
    seen: set[int] = set()
    hits = 0
    for row in workload.rows:
        hits += BLOCK_TOKENS * sum(block in seen for block in row.hash_ids)
        seen.update(row.hash_ids)
    return hits / sum(row.input_tokens for row in workload.rows)


@pytest.mark.parametrize(
    ("data", "share"), [(ARXIV_SUM, 0.0), (L_EVAL, 0.81), (SIMULATED[0], 0.49)]
)
def test_data_sets_have_the_printed_means_and_shares(data: DataSet, share: float) -> None:
    workload = data.draw(600, seed=3)
    rows = workload.rows
    assert sum(row.input_tokens for row in rows) / 600 == pytest.approx(data.input_tokens, rel=0.03)
    assert sum(row.output_tokens for row in rows) / 600 == pytest.approx(
        data.output_tokens, rel=0.03
    )
    assert reused_share(workload) == pytest.approx(share, abs=0.02)
    assert all(len(row.hash_ids) == -(-row.input_tokens // BLOCK_TOKENS) for row in rows)
    assert rows[-1].arrived_s == pytest.approx(600, rel=0.15)
    assert data.draw(600, seed=3) == workload != data.draw(600, seed=4)


def test_a_capacity_is_the_highest_rate_within_both_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The P90s of the made-up cluster grow with the rate in a known way."""
    p90_of = {MOONCAKE: (1.0, 0.1), v3_capacity.BALANCED: (2.0, 0.1), VLLM: (1.0, 0.5)}

    def p90(_: object, name: str, rate: float, *rest: object) -> tuple[float, float]:
        ttft_s, tbt_s = p90_of[name]
        return 1.0 + ttft_s * rate, 0.02 + tbt_s * rate

    monkeypatch.setattr(v3_capacity, "_p90", p90)
    claims = [Claim(ARXIV_SUM, 0.2, False, (0.5, 1.0, 2.0))]
    found, _ = v3_capacity.measure(Options(quick=True), claims)
    by = found["ArXiv"]
    # TTFT may be at most 10 x 1.02 s, and TBT at most 5 x 0.022 s. This allows rates up to 0.9, and
    # for vLLM up to 0.18.
    assert 0.9 / 1.1 < by[MOONCAKE].by_both <= 0.9 and by[MOONCAKE].by_ttft > 5
    assert 0.18 / 1.1 < by[VLLM].by_both <= 0.18


def test_a_claim_is_set_beside_the_rates_of_its_figure() -> None:
    found = {
        "ArXiv": {
            MOONCAKE: LimitedRates(3.4, 3.0),
            v3_capacity.BALANCED: LimitedRates(1.0, 1.0),
            VLLM: LimitedRates(1.7, 1.5),
        }
    }
    rows = {
        row.label: row for row in claim_rows(found, [Claim(ARXIV_SUM, 0.2, False, (1.0, 2.0, 3.0))])
    }
    assert rows["ArXiv: 3P+1D over vLLM"].ours == pytest.approx(2.0)
    assert rows["ArXiv: the same, on the rates that the figure shows"].ours == 3.0
    assert rows["ArXiv: the same within both limits"].ours == 2.0


def test_a_delay_ends_when_the_prompts_first_step_begins() -> None:
    cost, shape = DEPLOYMENTS[1].cost(), dollars.shape_of("yi-34b")
    jobs = [SoloRequest(0.0, 4000, 4), SoloRequest(0.0, 4000, 4), SoloRequest(50.0, 100, 4)]
    served = serve(jobs, cost, shape, SoloConfig("prefill-first", 4000, 8, 100_000))
    first, second, third = delays_s(jobs, served)
    assert first == pytest.approx(0.0) and third == pytest.approx(0.0)
    assert 0.5 < second < served.ttft_s[1]


def test_another_rate_has_the_same_requests() -> None:
    slow, fast = at_rate(CHAT, 40, 1, 0.5), at_rate(CHAT, 40, 1, 2.0)
    assert [(a.prompt_tokens, a.output_tokens) for a in slow] == [
        (b.prompt_tokens, b.output_tokens) for b in fast
    ]
    assert slow[-1].arrived_s == pytest.approx(4 * fast[-1].arrived_s)


def test_chunks_have_the_larger_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_capacity, "SERVE_QUICK_REQUESTS", 64)
    monkeypatch.setattr(serve_capacity, "SERVE_RATES", (0.05, 0.1, 0.2, 0.4, 0.8, 1.6))
    cell = Capacities(Options(quick=True)).cell(DEPLOYMENTS[1], CHAT, KINDS[0])
    assert cell.over(serve_capacity.VLLM) > 1


def test_dollars_follow_from_tokens_and_prices() -> None:
    offer = dollars.Offer(100.0, (("H100-SXM", 1), ("H20", 2)))
    assert offer.per_usd(USD_PER_H) == pytest.approx(360_000 / (11.06 + 2 * 4.63))


@pytest.fixture(scope="module")
def per_dollar() -> Finding:
    return dollars.run(Options())


def test_at_the_price_that_breaks_even_the_gain_is_the_claims(per_dollar: Finding) -> None:
    label = "33B, 4k, H100-SXM: 1.48 x the best number of H100-SXM if a H20 cost"
    usd = next(row.ours for row in per_dollar.rows if row.label == label)
    (cell,) = (
        cell
        for cell in dollars.dollar_cells(("H100-SXM",), ("H20",), USD_PER_H)
        if label.startswith(cell.name)
    )
    cheaper = {**USD_PER_H, "H20": usd}
    gain = cell.offloaded.per_usd(cheaper) / cell.best.per_usd(cheaper)
    assert gain == pytest.approx(1.48)


def test_the_claim_stands_beside_one_set_of_prices_only(per_dollar: Finding) -> None:
    claimed = [row.label for row in per_dollar.rows if row.paper is not None]
    assert len(claimed) == 2
    assert all(label.startswith("Table 1's prices") for label in claimed)
