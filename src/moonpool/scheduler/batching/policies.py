"""Batching policies: which requests share the next step, and with how many tokens each.

A policy takes two lists of (request, tokens left to compute), one of decodes and one of prefills,
and returns the step as a list of (request, tokens to compute). The policy knows nothing else about
a request, so it is pure and its tests use plain names as requests.

`chunked` is SARATHI's and the default; the others are baselines to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from moonpool.config.tables import Batching

RequestT = TypeVar("RequestT")
Share = tuple[RequestT, int]
"""A request and a number of its tokens."""


class BatchPlanner(Protocol):
    """The signature of a batching policy. Decodes come with 1 token each; both lists are in order
    of priority. The step has at most `max_sequences` entries; `token_budget` limits its tokens as
    far as the policy says."""

    def __call__(
        self,
        decodes: Sequence[Share[RequestT]],
        prefills: Sequence[Share[RequestT]],
        token_budget: int,
        max_sequences: int,
    ) -> list[Share[RequestT]]: ...


def plan_chunked(
    decodes: Sequence[Share[RequestT]],
    prefills: Sequence[Share[RequestT]],
    token_budget: int,
    max_sequences: int,
) -> list[Share[RequestT]]:
    """Chunked prefill: all decodes, then prefill chunks, within the budget (SARATHI section 3).

    Decodes go first, so that none stalls. A prefill gets as many tokens as fit: several short
    prompts share a step, and a long one is cut into chunks.
    """
    assert token_budget > 0 and max_sequences > 0
    step = list(decodes[: min(max_sequences, token_budget)])
    assert sum([num_tokens for _, num_tokens in step]) == len(step)
    tokens_left = token_budget - len(step)
    for request, num_uncomputed in prefills:
        if len(step) == max_sequences or not tokens_left:
            break
        num_tokens = min(num_uncomputed, tokens_left)
        step.append((request, num_tokens))
        tokens_left -= num_tokens
    return step


def plan_prefill_first(
    decodes: Sequence[Share[RequestT]],
    prefills: Sequence[Share[RequestT]],
    token_budget: int,
    max_sequences: int,
) -> list[Share[RequestT]]:
    """Batches of whole prompts before any decode, as vLLM ran them before chunked prefill.

    Takes as many prompts as the budget allows, and always the first one. Decodes run only when no
    prompt waits, so they stall behind prompts.
    """
    assert token_budget > 0 and max_sequences > 0
    step: list[Share[RequestT]] = []
    tokens_left = token_budget
    for request, num_uncomputed in prefills:
        too_many = len(step) == max_sequences or num_uncomputed > tokens_left
        if step and too_many:
            break
        step.append((request, num_uncomputed))
        tokens_left -= num_uncomputed
    return step or list(decodes[:max_sequences])


def plan_whole_prompts(
    decodes: Sequence[Share[RequestT]],
    prefills: Sequence[Share[RequestT]],
    token_budget: int,
    max_sequences: int,
) -> list[Share[RequestT]]:
    """Hybrid batches of decodes and whole prompts, as Orca's iteration-level scheduling forms them.

    Takes all decodes and as many prompts as the budget allows, and always the first one. A budget
    below any prompt's length therefore gives one prompt per step: Orca's best case in SARATHI.
    """
    assert token_budget > 0 and max_sequences > 0
    step = list(decodes[:max_sequences])
    tokens_left = token_budget - len(step)
    first = True
    for request, num_uncomputed in prefills:
        too_long = num_uncomputed > tokens_left and not first
        if len(step) == max_sequences or too_long:
            break
        step.append((request, num_uncomputed))
        tokens_left -= num_uncomputed
        first = False
    return step


class AlternatingPlanner:
    """Runs chunks and decodes in turns, never in one step: chunking without hybrid batches, which
    Sarathi-Serve's ablation calls chunked prefills only. If one of the two has nothing to run, its
    turn goes to the other.
    """

    def __init__(self) -> None:
        self._prefill_next = True

    def __call__(
        self,
        decodes: Sequence[Share[RequestT]],
        prefills: Sequence[Share[RequestT]],
        token_budget: int,
        max_sequences: int,
    ) -> list[Share[RequestT]]:
        turns = {
            True: plan_chunked((), prefills, token_budget, max_sequences),
            # No chunk shares a step with decodes, so the budget does not limit them.
            False: plan_chunked(decodes, (), max_sequences, max_sequences),
        }
        turn = self._prefill_next if turns[self._prefill_next] else not self._prefill_next
        self._prefill_next = not turn
        return turns[turn]


PLANNERS: dict[Batching, Callable[[], BatchPlanner]] = {
    "chunked": lambda: plan_chunked,
    "fixed-chunks": lambda: plan_chunked,  # like vLLM: the token budget ignores the TBT SLO
    "prefill-first": lambda: plan_prefill_first,
    "whole-prompts": lambda: plan_whole_prompts,
    "alternating": AlternatingPlanner,
}
"""Makes the planner of one instance; a planner may have state."""
