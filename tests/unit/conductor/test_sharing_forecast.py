"""Tests the prediction of how many later requests share the blocks that a request computes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.admission.sharing_forecast import MAX_BLOCKS, SharingForecast
from moonpool.types import BlockKey

BLOCK_TOKENS = 512


def document(name: int, blocks: int = 8) -> list[BlockKey]:
    return [BlockKey(f"{name}/{index}".encode()) for index in range(blocks)]


def learned(readers: int, documents: int = 60, pause_s: float = 1.0) -> SharingForecast:
    """Learns from documents, each of which this many readers ask for, one after the other."""
    forecast = SharingForecast()
    for name in range(documents):
        for reader in range(readers):
            forecast.note_arrival(document(name), BLOCK_TOKENS, (name * readers + reader) * pause_s)
    return forecast


def share_of_first(forecast: SharingForecast, now: float, name: int = -1) -> float:
    keys = document(name)
    forecast.note_arrival(keys, BLOCK_TOKENS, now)
    return forecast.own_share(keys, 0, BLOCK_TOKENS)


def test_the_first_reader_of_a_shared_document_bears_its_share() -> None:
    assert share_of_first(learned(readers=1), 60.0) == 1.0
    assert 0.2 < share_of_first(learned(readers=4), 240.0) < 0.4
    assert share_of_first(learned(readers=7), 420.0) < 0.25


def test_who_comes_after_the_last_reader_bears_all() -> None:
    forecast = learned(readers=2)
    keys = document(-1)
    for now in (120.0, 121.0):
        forecast.note_arrival(keys, BLOCK_TOKENS, now)
    assert forecast.own_share(keys, 0, BLOCK_TOKENS) > 0.9, "two readers came, as of all others"


def test_only_what_is_not_cached_is_shared_out() -> None:
    forecast = learned(readers=5)
    keys = [*document(3), *document(-1, 2)]
    forecast.note_arrival(keys, BLOCK_TOKENS, 300.0)
    last = forecast.own_share(keys, 9, BLOCK_TOKENS)
    assert last == forecast.own_share(keys[9:], 0, BLOCK_TOKENS)
    assert forecast.own_share(keys, len(keys), BLOCK_TOKENS) == 1.0


def test_known_blocks_are_counted_by_the_sample() -> None:
    forecast = SharingForecast()
    keys = document(1, 64)
    assert forecast.note_arrival(keys[:40], 32, 0.0) == 0
    assert forecast.note_arrival(keys, 32, 1.0) == 48, "three samples of sixteen blocks"
    assert forecast.note_arrival(keys[:4], 32, 2.0) == 4


def test_demand_that_ends_is_forgotten() -> None:
    forecast = learned(readers=4)
    shared = share_of_first(forecast, 240.0)
    for name in range(100, 400):
        forecast.note_arrival(document(name), BLOCK_TOKENS, 240.0 + name)
    assert share_of_first(forecast, 700.0, -2) > 2 * shared


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.floats(0.0, 90.0)), max_size=80)
)
def test_shares_are_shares_and_memory_is_bounded(arrivals: list[tuple[int, int, float]]) -> None:
    forecast, now = SharingForecast(), 0.0
    for name, blocks, pause_s in arrivals:
        now += pause_s
        keys = document(name, blocks)
        assert 0 <= forecast.note_arrival(keys, BLOCK_TOKENS, now) <= blocks
        assert 0.0 < forecast.own_share(keys, 0, BLOCK_TOKENS) <= 1.0


def test_many_blocks_stay_within_the_bound() -> None:
    forecast = SharingForecast()
    keys = [BlockKey(str(number).encode()) for number in range(MAX_BLOCKS + 500)]
    forecast.note_arrival(keys, BLOCK_TOKENS, 0.0)
    assert forecast.note_arrival(keys[:500], BLOCK_TOKENS, 1.0) == 0
    assert forecast.note_arrival(keys[-500:], BLOCK_TOKENS, 2.0) == 500
