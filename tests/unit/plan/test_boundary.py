"""The fewest instances, on made-up outcomes: that it is they, and how often is asked."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.plan.boundary import boundary, grown, side_by_side
from moonpool.plan.candidate import Candidate, NodeKind
from moonpool.plan.trial import Outcome
from tests.unit.plan.made_up import outcome

KIND = NodeKind("A800-SXM", 8)


def candidate(prefill: int, decode: int, mixed: int = 0) -> Candidate:
    return Candidate(KIND, KIND, prefill, decode, mixed, 1_000_000, 2048)


def needing(prefill: int, decode: int, one: Candidate) -> Outcome:
    return outcome(one.prefill / prefill, one.decode / decode)


@settings(max_examples=200, deadline=None)
@given(
    need=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    start=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    roles=st.permutations(["prefill", "decode"]),
)
def test_it_is_the_fewest_of_each_from_wherever_it_starts(
    need: tuple[int, int], start: tuple[int, int], roles: list[str]
) -> None:
    asked: list[Candidate] = []

    def answer(wanted: list[Candidate]) -> list[Outcome]:
        asked.extend(wanted)
        return [needing(*need, one) for one in wanted]

    [found] = side_by_side([boundary(candidate(*start), 1.0, roles)], answer)
    assert found == candidate(*need)
    assert len(set(asked)) == len(asked) <= 35


def test_near_the_start_it_asks_little() -> None:
    asked: list[Candidate] = []

    def answer(wanted: list[Candidate]) -> list[Outcome]:
        asked.extend(wanted)
        return [needing(5, 2, one) for one in wanted]

    [found] = side_by_side([boundary(candidate(5, 2), 1.0, ["prefill", "decode"])], answer)
    assert found == candidate(5, 2) and len(asked) == 3


def test_what_nothing_helps_ends() -> None:
    [found] = side_by_side(
        [boundary(candidate(1, 1), 0.9, ["prefill", "decode"])],
        lambda wanted: [outcome(0.5, 1.0) for _ in wanted],
    )
    assert found is None


def test_several_are_asked_at_once() -> None:
    batches: list[int] = []

    def answer(wanted: list[Candidate]) -> list[Outcome]:
        batches.append(len(wanted))
        return [needing(3, 1, one) for one in wanted]

    askings = [boundary(candidate(n, 1), 1.0, ["prefill", "decode"]) for n in (1, 3, 6)]
    assert side_by_side(askings, answer) == [candidate(3, 1)] * 3
    assert batches[0] == 3


def test_it_grows_by_what_the_misses_lacked() -> None:
    def more(one: Candidate, prefill: float, decode: float) -> Candidate:
        found = outcome(prefill, decode)
        return grown(one, found.misses, 1.0 - found.share)

    one = candidate(8, 4)
    assert more(one, 0.5, 1.0) == candidate(12, 4)
    assert more(one, 1.0, 0.5) == candidate(8, 6)
    assert more(one, 0.5, 0.5) == candidate(14, 7)
    assert more(one, 0.99, 1.0) == candidate(9, 4)
    assert more(candidate(0, 0, 8), 0.5, 1.0).mixed == 12
