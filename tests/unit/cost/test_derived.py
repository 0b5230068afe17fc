"""Tests costs that are fitted to ground truth: exact where the truth has the fitted form, close
elsewhere."""

from __future__ import annotations

import pytest

from moonpool.cost.fitted import FittedCost, fit_to_ground_truth, pipelined, scaled
from moonpool.cost.model import StepCost, prompt_s
from moonpool.sim.hardware.calibrated import CALIBRATED
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.parallel_cost import Nic, group_cost
from moonpool.sim.hardware.roofline import RooflineCost

A800, LLAMA_70B = BUILT_IN.device("A800-SXM"), BUILT_IN.shape("llama3-70b")
ROOFLINE = RooflineCost(A800, LLAMA_70B, 8)
RECORDED = [
    "0x1.47949de23580fp-6",
    "0x1.f4b36989f5a0ap-14",
    "0x1.1a8c9ce7c72c8p-30",
    "0x1.eb258945599b8p-30",
    "0x1.948bc573be667p-6",
    "0x1.db4889ea5ee85p-15",
    "0x1.1f97b41e088cap-25",
]


def fitted_to(truth: StepCost, chunk_tokens: int = 1024) -> FittedCost:
    return fit_to_ground_truth(
        truth,
        chunk_tokens,
        max_tokens=131072,
        transfer_latency_s=0.001,
        shared_memory_bytes_per_s=99e9,
        network_bytes_per_s=87e9,
    )


def test_a_truth_of_the_fitted_form_is_recovered() -> None:
    fitted = fitted_to(CALIBRATED)
    assert fitted.prefill == pytest.approx(CALIBRATED.prefill, rel=1e-9)
    assert fitted.decode == pytest.approx(CALIBRATED.decode, rel=1e-9)
    assert fitted.network_bytes_per_s == 87e9
    assert fitted.shared_memory_bytes_per_s == 99e9
    assert fitted.transfer_latency_s == 0.001


def test_the_fit_is_the_same_on_every_machine() -> None:
    """The figures were recorded once; a difference in the last bit would make simulations differ
    between machines."""
    fitted = fitted_to(ROOFLINE)
    assert fitted == fitted_to(RooflineCost(A800, LLAMA_70B, 8))
    assert [float.hex(x) for x in fitted.prefill + fitted.decode] == RECORDED


@pytest.mark.parametrize("kind", ["alone", "cpp"])
def test_a_roofline_is_fitted_within_a_tenth(kind: str) -> None:
    truth: StepCost = ROOFLINE
    if kind == "cpp":
        truth = group_cost(ROOFLINE, LLAMA_70B, 4, "cpp", Nic.of(A800, 8))
    fitted = fitted_to(truth)
    for num_tokens in (200, 1000, 3000, 8192, 30000, 65536, 131072):
        for cached in (0, num_tokens // 3, num_tokens * 9 // 10):
            true_s = prompt_s(truth, num_tokens, cached, 1024)
            assert fitted.prefill_s(num_tokens, cached) == pytest.approx(true_s, rel=0.2)
        whole_s = prompt_s(truth, num_tokens, 0, 1024)
        assert fitted.prefill_s(num_tokens, 0) == pytest.approx(whole_s, rel=0.1)
    for batch in (1, 7, 40, 128):
        for context in (500, 8000, 60000):
            stages, share = truth.num_stages, -(-batch // truth.num_stages)
            true_s = stages * (truth.step_s((), share, share * context) + truth.hop_s(share))
            # less exact with stages, because 7 layers do not divide evenly
            rel = 0.02 if stages == 1 else 0.1
            assert fitted.decode_step_s(batch, batch * context) == pytest.approx(true_s, rel=rel)


def test_a_measured_pipeline_equals_a_simulated_one() -> None:
    """In a measured pipeline, a prompt is priced by the time of a stage, and a decode by the time
    between tokens with a stage's share of the batch."""
    whole = FittedCost(prefill=(0.01, 1e-4, 1e-9, 2e-9), decode=(0.02, 1e-3, 1e-7))
    nic = Nic(bytes_per_s=1e15, latency_s=0.0)
    simulated = fitted_to(group_cost(whole, LLAMA_70B, 2, "cpp", nic))
    measured = pipelined(whole, 2)
    assert measured.prefill == pytest.approx(simulated.prefill, rel=1e-6)
    for batch in (2, 8, 64):
        expected_s = simulated.decode_step_s(batch, batch * 1000)
        assert measured.decode_step_s(batch, batch * 1000) == pytest.approx(expected_s, rel=0.02)
    assert pipelined(whole, 1) is whole


def test_a_cost_can_be_made_wrong() -> None:
    wrong = scaled(CALIBRATED, prefill_factor=1.5, decode_factor=0.5)
    assert wrong.prefill_s(9000, 2000) == pytest.approx(1.5 * CALIBRATED.prefill_s(9000, 2000))
    assert wrong.decode_step_s(9, 9000) == pytest.approx(0.5 * CALIBRATED.decode_step_s(9, 9000))
    assert wrong.transfer_s(10**9, False) == CALIBRATED.transfer_s(10**9, False)
    with pytest.raises(ValueError, match="above 0"):
        scaled(CALIBRATED, 0.0, 1.0)
