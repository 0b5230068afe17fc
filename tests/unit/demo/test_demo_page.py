"""The demo's page compares the same questions with and without reuse."""

from __future__ import annotations

from moonpool_lab.demo.answers import AnsweredTurn, DemoRun
from moonpool_lab.demo.client import ClientResponse
from moonpool_lab.demo.page import render_page


def a_turn(turn: int, ttft_s: float) -> AnsweredTurn:
    answer = ClientResponse(
        token_instants_s=[ttft_s], prompt_tokens=3_743, cached_tokens=1_024 * (turn - 1)
    )
    explained = {
        "observed": {"tpot_s": 0.004},
        "fetched_tokens": 0,
        "loaded_tokens": 0,
        "prefill_instance": "prefill-0",
        "decode_instance": "decode-0",
        "stages_s": {"prefill": ttft_s},
    }
    return AnsweredTurn(turn, "user 1", "berth-129", answer, True, explained)


def test_it_compares_the_same_questions() -> None:
    on = DemoRun(True, turns_s=[2.0, 0.1], rows=[a_turn(1, 2.0), a_turn(2, 0.1)])
    off = DemoRun(False, turns_s=[1.3], rows=[a_turn(2, 1.3)])
    page = render_page(on, off)
    assert "came 13.0 times as soon" in page.replace("\n", " "), "not over the cold first turn"
    assert "mean TTFT, last 1 answers" in page
    assert "1,300 ms without reuse" in page
    assert '<td class="number">2,000.0</td>' in page and '<td class="number">3,743</td>' in page
    assert '<td class="">prefill-0</td>' in page
