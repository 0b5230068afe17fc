from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from moonpool.api.stop_strings import StopMatcher

AB = st.text(alphabet="ab", min_size=1, max_size=4)


def earliest_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Returns the place where the first stop string is complete, and the longest of the stop
    strings that end there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return end, max(ended, key=len)
    return None


@given(
    st.lists(st.text(alphabet="ab", max_size=3), max_size=12),
    st.lists(AB, min_size=1),
    st.booleans(),
)
@example(["aa", "b"], ["aab"], False)
def test_the_text_is_cut_where_the_first_stop_string_is(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    given_out = ""
    for piece in pieces:
        given_out += matcher.push(piece)
        if matcher.found:
            break
    else:
        given_out += matcher.flush()
    expected = earliest_end("".join(pieces), stops)
    if expected is None:
        assert matcher.found is None
        assert given_out == "".join(pieces)
    else:
        end, stop = expected
        assert matcher.found == stop
        assert given_out == "".join(pieces)[: end if include else end - len(stop)]


@given(st.text(alphabet="ab", max_size=20), st.lists(AB, min_size=1))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include_stop=False)
    given_out = ""
    for count, character in enumerate(text, start=1):
        given_out += matcher.push(character)
        if matcher.found:
            return
        held = text[len(given_out) : count]
        longest = max(
            size
            for stop in stops
            for size in range(len(stop))
            if text[:count].endswith(stop[:size])
        )
        assert len(held) == longest


def test_a_long_stop_string_costs_no_more_per_character() -> None:
    matcher = StopMatcher(["a" * 4000 + "b"], include_stop=False)
    out = "".join(matcher.push("a") for _ in range(20_000))
    assert len(out) == 16_000
    assert matcher.push("b") == ""
    assert matcher.found is not None
