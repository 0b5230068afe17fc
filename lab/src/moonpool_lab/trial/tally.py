"""Counts what the answers of a trial show, and which faults are proven.

Three tests show a fault, and rounding alone fails none of them:
- a foreign group of a code in an answer is proof by itself;
- differences that no near-tie explains, beyond a share that is granted to chance (binomial);
- planted codes that the reference names and answers under load lack, compared with the same
  server's repeats without load (Fisher's exact test).
A difference alone proves nothing: `p_differs` only says whether load changes answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Any

import msgspec

from moonpool_lab.trial.answer import Answer
from moonpool_lab.trial.conversations import Question
from moonpool_lab.trial.reference import AnswerDifference, Reference

PROVEN_P = 0.01
GRANTED_SHARE = 0.001
"""Share of answers that may differ beyond near-ties on a server that only rounds."""
GRANTED_SHARE_WITHOUT_LOGPROBS = 0.01
"""The same share if near-ties are unknown, because rounding may then have left out or doubled
words."""
MAX_EXAMPLES = 20


class Phase(msgspec.Struct):
    """Counts of the answers given without load, or under load."""

    asked: int = 0
    answered: int = 0
    kinds: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of answers by the kind of their first difference, including `right`."""
    wrong_tokens: int = 0
    missing_tokens: int = 0
    doubled_tokens: int = 0
    foreign: int = 0
    facts: int = 0
    """Number of answers that should name the planted code because their reference does, without
    near-ties."""
    facts_lost: int = 0
    failed: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of requests without a whole answer: refused, error, cut or hung. Requests that a
    restart of the server ended are not counted."""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def differing(self) -> int:
        return self.answered - self.kinds["right"]

    @property
    def unexplained(self) -> int:
        """Number of answers that differ by more than a near-tie, without those whose logprobs are
        unknown."""
        return sum(self.kinds[kind] for kind in ("wrong", "missing", "doubled"))


class Tally:
    """Counts the answers of one server."""

    def __init__(self, references: dict[str, Reference]) -> None:
        """`references`: the references by the name of their question."""
        self._references = references
        self.quiet = Phase()
        self.load = Phase()
        self.examples: list[dict[str, Any]] = []

    @property
    def names(self) -> Set[str]:
        """The names of the questions that have a reference."""
        return self._references.keys()

    def count(self, phase: Phase, question: Question, answer: Answer, foreign: set[str]) -> None:
        phase.asked += 1
        if foreign:
            phase.foreign += 1
            self._show(question, answer, f"foreign: {', '.join(sorted(foreign))}")
        if answer.outcome != "answered":
            phase.failed[answer.outcome] += 1
            if answer.outcome != "refused":
                self._show(question, answer, answer.outcome)
            return
        phase.prompt_tokens += answer.prompt_tokens
        phase.cached_tokens += answer.cached_tokens
        reference = self._references.get(question.name)
        if reference is None:
            return  # a filler has no reference, so only foreign text would show
        phase.answered += 1
        found = reference.compare(answer)
        self._add(phase, found)
        if question.fact in reference.text and found.kind != "near_tie":
            phase.facts += 1
            phase.facts_lost += question.fact not in answer.text
        if found.kind not in ("right", "near_tie"):
            self._show(question, answer, f"{found.kind} at token {found.at_token}")

    @staticmethod
    def _add(phase: Phase, found: AnswerDifference) -> None:
        phase.kinds[found.kind] += 1
        phase.wrong_tokens += found.wrong_tokens
        phase.missing_tokens += found.missing_tokens
        phase.doubled_tokens += found.doubled_tokens

    def _show(self, question: Question, answer: Answer, why: str) -> None:
        if len(self.examples) < MAX_EXAMPLES:
            reference = self._references.get(question.name)
            self.examples.append(
                {
                    "question": question.name,
                    "why": why,
                    "detail": answer.detail,
                    "answer": answer.text,
                    "reference": reference.text if reference else None,
                }
            )

    def figures(self) -> dict[str, Any]:
        """Returns counts and p-values; `proven` lists why answers are wrong, or is empty."""
        with_logprobs = sum(r.has_logprobs for r in self._references.values())
        granted = (
            GRANTED_SHARE
            if with_logprobs == len(self._references)
            else GRANTED_SHARE_WITHOUT_LOGPROBS
        )
        unexplained = self.quiet.unexplained + self.load.unexplained
        p_unexplained = _binomial(unexplained, self.quiet.answered + self.load.answered, granted)
        p_facts = fisher_p(
            self.load.facts_lost, self.load.facts, self.quiet.facts_lost, self.quiet.facts
        )
        foreign = self.quiet.foreign + self.load.foreign
        proven = [f"{foreign} answers with text of other conversations"] if foreign else []
        if 2 * p_unexplained < PROVEN_P:  # Bonferroni correction for two tests
            proven.append(f"{unexplained} answers that no near-tie explains")
        if 2 * p_facts < PROVEN_P:
            proven.append(f"{self.load.facts_lost} planted codes lost under load")
        return {
            "quiet": counts_of(self.quiet),
            "load": counts_of(self.load),
            "references": len(self._references),
            "references_with_logprobs": with_logprobs,
            "p_differs": fisher_p(
                self.load.differing, self.load.answered, self.quiet.differing, self.quiet.answered
            ),
            "p_unexplained": p_unexplained,
            "p_facts_lost": p_facts,
            "proven": proven,
            "examples": self.examples,
        }


def counts_of(phase: Phase) -> dict[str, Any]:
    """Returns the counts of a phase as JSON, with the figures that follow from them."""
    found: dict[str, Any] = msgspec.to_builtins(phase)
    found["differing"], found["unexplained"] = phase.differing, phase.unexplained
    return found


def fisher_p(count: int, answers: int, count_beside: int, answers_beside: int) -> float:
    """Returns the p-value of the hypothesis that the first rate is not above the second, by
    Fisher's exact test."""
    from scipy.stats import fisher_exact

    if not count:
        return 1.0
    table = [[count, answers - count], [count_beside, answers_beside - count_beside]]
    return float(fisher_exact(table, alternative="greater").pvalue)


def _binomial(count: int, trials: int, share: float) -> float:
    from scipy.stats import binomtest

    return float(binomtest(count, trials, share, "greater").pvalue) if count else 1.0
