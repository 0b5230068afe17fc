"""Tests which faults a tally calls proven, and which it must not call proven."""

from __future__ import annotations

import random

from moonpool_lab.trial.answer import Answer
from moonpool_lab.trial.conversations import ConversationMaker, Question, groups_of
from moonpool_lab.trial.reference import Reference
from moonpool_lab.trial.tally import Phase, Tally

QUESTION = Question("q", "chat", (("user", "say"),), "ABCDEF-GHJKLM", 8)
RIGHT = "it is ABCDEF-GHJKLM and that is all there is to say of it"


def tally() -> Tally:
    return Tally({"q": Reference(Answer(text=RIGHT, finish="stop"), 0.5)})


def count(
    found: Tally, phase: Phase, text: str, times: int, foreign: set[str] | None = None
) -> None:
    for _ in range(times):
        found.count(phase, QUESTION, Answer(text=text, finish="stop"), foreign or set())


def test_right_answers_prove_nothing() -> None:
    found = tally()
    count(found, found.quiet, RIGHT, 50)
    count(found, found.load, RIGHT, 200)
    figures = found.figures()
    assert figures["proven"] == []
    assert figures["p_differs"] == figures["p_unexplained"] == figures["p_facts_lost"] == 1.0


def test_one_foreign_group_is_proof() -> None:
    found = tally()
    count(found, found.load, RIGHT, 1, {"XXXXXX"})
    assert len(found.figures()["proven"]) == 1


def test_other_wording_under_load_is_no_proof_without_logprobs() -> None:
    found = tally()
    count(found, found.quiet, RIGHT, 50)
    count(found, found.load, RIGHT, 100)
    count(found, found.load, "the code was ABCDEF-GHJKLM, as you said before", 60)
    figures = found.figures()
    assert figures["p_differs"] < 1e-6, "load changes answers"
    assert figures["proven"] == []


def test_codes_lost_under_load_are_proof_but_not_where_quiet_loses_them_too() -> None:
    found = tally()
    count(found, found.quiet, RIGHT, 50)
    count(found, found.load, RIGHT, 50)
    count(found, found.load, "it is unknown to me, sorry", 20)
    assert "20 planted codes lost under load" in found.figures()["proven"]
    count(found, found.quiet, "it is unknown to me, sorry", 20)
    assert found.figures()["proven"] == []


def test_words_left_out_again_and_again_are_proof() -> None:
    found = tally()
    count(found, found.quiet, RIGHT, 50)
    count(found, found.load, RIGHT, 150)
    count(found, found.load, RIGHT.replace(" and", ""), 1)
    assert found.figures()["proven"] == [], "once may be chance"
    count(found, found.load, RIGHT.replace(" and", ""), 9)
    assert found.figures()["proven"] == ["10 answers that no near-tie explains"]


def test_a_group_of_the_own_prompt_is_not_foreign() -> None:
    maker = ConversationMaker(1, ("chat", "completions"), 8, 400)
    questions = maker.questions(4)
    assert len({q.name for q in questions}) == 24
    for question in questions:
        assert question.fact in question.text
        assert maker.foreign_to(question, question.text) == set()
    other = random.Random(1).choice(questions[6:])
    assert maker.foreign_to(questions[0], f"x{other.fact}y") == groups_of(other.fact)


def test_forks_share_a_prefix_and_second_turns_extend_first_ones() -> None:
    first, second, fork, *_ = ConversationMaker(1, ("chat",), 8, 400).questions(1)
    assert first.messages[0] == second.messages[0] == fork.messages[0]
    assert len(second.messages) > len(first.messages)
    assert first.fact != fork.fact
