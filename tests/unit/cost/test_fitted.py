"""Tests the fitted cost model: it finds known coefficients, and never predicts less time for more
work."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cost.fitted import (
    DecodeSample,
    FittedCost,
    MixedSample,
    PrefillSample,
    fit_cost,
    pipelined,
)
from moonpool.cost.model import Chunk

TRUE = FittedCost(prefill=(0.004, 2e-4, 3e-9, 5e-9), decode=(0.006, 4e-4, 2e-8))
PREFILLS = [
    (n, p) for n in (16, 64, 256, 1024, 4096, 16384) for p in (0, n // 4, n // 2, n - 16) if p < n
]
DECODES = list(itertools.product((1, 2, 8, 32), (100, 1000, 10000, 100000)))


def measure(cost: FittedCost, noise: float = 0.0, seed: int = 0) -> FittedCost:
    rng = random.Random(seed)

    def noisy(seconds: float) -> float:
        return seconds * (1 + rng.uniform(-noise, noise))

    return fit_cost(
        [
            PrefillSample(num_tokens=n, cached_tokens=p, seconds=noisy(cost.prefill_s(n, p)))
            for n, p in PREFILLS
        ],
        [
            DecodeSample(batch=b, context_tokens=c, seconds=noisy(cost.decode_step_s(b, c)))
            for b, c in DECODES
        ],
    )


def test_finds_known_coefficients() -> None:
    fitted = measure(TRUE)
    assert fitted.prefill == pytest.approx(TRUE.prefill, rel=1e-6)
    assert fitted.decode == pytest.approx(TRUE.decode, rel=1e-6)


@pytest.mark.parametrize("zero", range(4))
def test_finds_that_a_term_is_missing(zero: int) -> None:
    prefill = tuple(0.0 if i == zero else c for i, c in enumerate(TRUE.prefill))
    fitted = measure(FittedCost(prefill=prefill, decode=TRUE.decode))
    assert fitted.prefill == pytest.approx(prefill, rel=1e-5, abs=1e-15)


@pytest.mark.parametrize("seed", range(20))
def test_estimates_survive_noise(seed: int) -> None:
    fitted = measure(TRUE, noise=0.1, seed=seed)
    for n, p in PREFILLS:
        assert fitted.prefill_s(n, p) == pytest.approx(TRUE.prefill_s(n, p), rel=0.15)
    for b, c in DECODES:
        assert fitted.decode_step_s(b, c) == pytest.approx(TRUE.decode_step_s(b, c), rel=0.15)
    assert min(fitted.prefill + fitted.decode) >= 0


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 0.99), st.floats(1e-6, 100)), min_size=1),
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 10**6), st.floats(1e-6, 100)), min_size=1
    ),
)
def test_never_negative_and_grows_with_the_work(
    prefills: list[tuple[int, float, float]], decodes: list[tuple[int, int, float]]
) -> None:
    """This must be true for any measurements, even absurd ones."""
    cost = fit_cost(
        [PrefillSample(num_tokens=n, cached_tokens=int(n * p), seconds=s) for n, p, s in prefills],
        [DecodeSample(batch=b, context_tokens=c, seconds=s) for b, c, s in decodes],
    )
    assert min(cost.prefill + cost.decode) >= 0
    assert cost.prefill_s(100, 0) <= cost.prefill_s(200, 0) <= cost.prefill_s(10**5, 0)
    assert cost.decode_step_s(1, 100) <= cost.decode_step_s(2, 100) <= cost.decode_step_s(2, 900)
    assert cost.prefill_s(100, 100) >= 0


def test_cached_tokens_save_time() -> None:
    times = [TRUE.prefill_s(4096, cached) for cached in range(0, 4097, 256)]
    assert times == sorted(times, reverse=True)
    assert TRUE.prefill_s(10, 20) == TRUE.prefill[0], "more cached than there is costs no less"


@pytest.mark.parametrize("seed", range(20))
def test_single_chunks_predict_long_prompts(seed: int) -> None:
    """Noise of 5 % in chunks of up to 256 tokens must not be squared in a prompt of 4,096. A
    separate coefficient c would square it: errors of half and more."""
    true = FittedCost(prefill=(0.01, 5e-4, 7e-8, 14e-8), decode=TRUE.decode)
    rng = random.Random(seed)
    chunks = [(16, 0), (64, 0), (64, 512), (256, 0), (256, 1024)]
    samples = [
        PrefillSample(
            num_tokens=new + cached,
            cached_tokens=cached,
            seconds=true.prefill_s(new + cached, cached) * rng.uniform(0.95, 1.05),
        )
        for new, cached in chunks
    ]
    decodes = [DecodeSample(batch=1, context_tokens=1, seconds=0.01)]
    whole = true.prefill_s(4096, 0)
    steps = fit_cost(samples, decodes, single_steps=True)
    assert steps.prefill_s(4096, 0) == pytest.approx(whole, rel=0.2)
    assert steps.prefill[3] == 2 * steps.prefill[2]


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit_cost([], [DecodeSample(batch=1, context_tokens=1, seconds=1.0)])


def test_transfer_time() -> None:
    cost = FittedCost(
        prefill=TRUE.prefill,
        decode=TRUE.decode,
        transfer_latency_s=0.01,
        shared_memory_bytes_per_s=4e9,
        network_bytes_per_s=1e9,
    )
    assert cost.transfer_s(0, same_host=True) == 0.0
    assert cost.transfer_s(10**9, same_host=False) == pytest.approx(1.01)
    assert cost.transfer_s(10**9, same_host=True) == pytest.approx(0.26)
    assert cost.transfer_s(10**9, same_host=False, num_sharing=3) == pytest.approx(3.01)


MIXED = list(itertools.product((16, 64, 256), (0, 512), (4, 16), (64, 1024)))


def measured_mixed(f: float, g: float) -> list[MixedSample]:
    return [
        MixedSample(
            num_tokens=new + cached,
            cached_tokens=cached,
            batch=batch,
            context_tokens=batch * context,
            seconds=max(TRUE.prefill_s(new + cached, cached), TRUE.decode[0])
            + f * batch
            + g * batch * context,
        )
        for new, cached, batch, context in MIXED
    ]


def measured_apart() -> tuple[list[PrefillSample], list[DecodeSample]]:
    prefills = [
        PrefillSample(num_tokens=n, cached_tokens=p, seconds=TRUE.prefill_s(n, p))
        for n, p in PREFILLS
    ]
    decodes = [
        DecodeSample(batch=b, context_tokens=c, seconds=TRUE.decode_step_s(b, c))
        for b, c in DECODES
    ]
    return prefills, decodes


def test_finds_what_decodes_add_to_a_chunk() -> None:
    fitted = fit_cost(*measured_apart(), measured_mixed(9e-4, 3e-8))
    assert fitted.mixed == pytest.approx((9e-4, 3e-8), rel=1e-5)
    chunk = Chunk(num_tokens=256, start=0, cached_tokens=0, last=True)
    expected = TRUE.prefill_s(256, 0) + 8 * 9e-4 + 8000 * 3e-8
    assert fitted.step_s((chunk,), 8, 8000) == pytest.approx(expected)
    assert fitted.step_s((), 8, 8000) == pytest.approx(TRUE.decode_step_s(8, 8000))


def test_what_decodes_add_is_taken_from_the_measured_chunk_alone() -> None:
    """Here, chunks take a tenth less time than their formula says, which is the time that ten
    decodes add."""
    samples = []
    for one in measured_mixed(2e-3, 1e-6):
        chunk_s = 0.9 * TRUE.prefill_s(one.num_tokens, one.cached_tokens)
        seconds = chunk_s + 2e-3 * one.batch + 1e-6 * one.context_tokens
        samples.append(msgspec.structs.replace(one, seconds=seconds, chunk_s=chunk_s))
    slow = [one for one in samples if one.chunk_s is not None and one.chunk_s > TRUE.decode[0]]
    found = fit_cost(*measured_apart(), slow).mixed
    assert found == (pytest.approx(2e-3), pytest.approx(1e-6))


def test_mixed_steps_without_information_leave_the_formulas_unchanged() -> None:
    """Decodes that seem to make a chunk faster must count as noise."""
    sample = MixedSample(num_tokens=256, cached_tokens=0, batch=4, context_tokens=64, seconds=1e-3)
    prefill = PrefillSample(num_tokens=256, cached_tokens=0, seconds=0.1)
    decode = DecodeSample(batch=4, context_tokens=64, seconds=0.01)
    assert fit_cost([prefill], [decode], [sample]).mixed is None


def test_a_fit_states_what_it_was_fitted_to() -> None:
    prefills = [
        PrefillSample(num_tokens=n, cached_tokens=p, seconds=0.01 + 1e-4 * (n - p))
        for n, p in ((64, 0), (512, 384), (1024, 0))
    ]
    decodes = [
        DecodeSample(batch=b, context_tokens=c, seconds=0.02 + 1e-3 * b)
        for b, c in ((2, 90), (8, 700))
    ]
    domain = fit_cost(prefills, decodes).domain
    assert domain is not None
    assert domain.prompt_tokens == (64, 1024) and domain.cached_share == 0.75
    assert domain.decode_batch == (2, 8) and domain.context_tokens == (90, 700)
    assert domain.has_prompt(1024, 768) and not domain.has_prompt(1024, 769)
    assert not domain.has_prompt(63, 0) and not domain.has_prompt(1025, 0)
    assert domain.has_decodes(2, 90) and not domain.has_decodes(9, 700)
    assert pipelined(fit_cost(prefills, decodes), 2).domain == domain.of_stages(2)


def test_a_short_step_that_took_longer_than_a_long_one_does_not_make_tokens_free() -> None:
    prefills = [
        PrefillSample(num_tokens=4, cached_tokens=0, seconds=0.90),
        PrefillSample(num_tokens=32, cached_tokens=0, seconds=0.83),
        PrefillSample(num_tokens=288, cached_tokens=256, seconds=0.84),
    ]
    decodes = [
        DecodeSample(batch=b, context_tokens=64 * b, seconds=0.05 + 0.01 * b) for b in (1, 4)
    ]
    cost = fit_cost(prefills, decodes, single_steps=True)
    fixed, per_token, *_ = cost.prefill
    assert fixed == pytest.approx(0.06)
    assert fixed + 32 * per_token == pytest.approx(0.83)


def test_a_long_step_that_took_too_long_does_not_make_longer_ones_last_for_minutes() -> None:
    prefills = [
        PrefillSample(num_tokens=4, cached_tokens=0, seconds=0.32),
        PrefillSample(num_tokens=32, cached_tokens=0, seconds=2.9),
    ]
    decodes = [DecodeSample(batch=1, context_tokens=64, seconds=0.5)]
    cost = fit_cost(prefills, decodes, single_steps=True)
    assert 20.0 < cost.prefill_s(512, 0) < 60.0
