"""Conversations and agents for the comparison of pools: their prompts and the order of the calls.

Prompts are texts in which codes are planted, and each asks for one of its codes. The prompts do not
depend on answers, so all rows get the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from moonpool.types import Struct
from moonpool_lab.trial.conversations import ConversationMaker, Question

Tokens = Sequence[int]


class PoolWorkloadShape(Struct, frozen=True):
    """A kind of session. Lengths are in words."""

    name: str
    sessions: int
    turns: int
    shared_words: int
    opening_words: int
    turn_words: int
    answer_tokens: int


SHAPES = {
    shape.name: shape
    for shape in (
        PoolWorkloadShape("conversations", 24, 4, 0, 240, 120, 32),
        PoolWorkloadShape("agents", 12, 10, 320, 120, 60, 24),
    )
}


class PoolCall(msgspec.Struct, frozen=True):
    """One request. `turn` 0 is the first of its session."""

    question: Question
    session: int
    turn: int

    @property
    def target(self) -> int:
        """Which of the two vLLMs gets the call: a turn never goes to the vLLM of the previous
        turn."""
        return (self.session + self.turn) % 2


class PoolWorkload:
    """The calls of a shape in the order in which they are sent, drawn from a seed."""

    def __init__(self, shape: PoolWorkloadShape, seed: int) -> None:
        self.shape = shape
        self.maker = ConversationMaker(
            seed, apis=("completions",), max_tokens=shape.answer_tokens, max_words=1 << 30
        )
        shared = self.maker.words(shape.shared_words) if shape.shared_words else ""
        sessions = [
            self.maker.session(
                f"{shape.name}-{number}",
                shared,
                shape.opening_words,
                shape.turn_words,
                shape.turns,
            )
            for number in range(shape.sessions)
        ]
        order = [number for number in range(shape.sessions) for _ in range(shape.turns)]
        random.Random(f"order {shape.name} {seed}").shuffle(order)
        turns = [0] * shape.sessions
        self.calls: list[PoolCall] = []
        for number in order:
            self.calls.append(PoolCall(sessions[number][turns[number]], number, turns[number]))
            turns[number] += 1

    def last_calls(self) -> list[PoolCall]:
        """Returns the last call of each session. After a run, a pool holds nearly all of the
        call's prompt."""
        return [call for call in self.calls if call.turn == self.shape.turns - 1]


class Prefixes(Struct, frozen=True):
    """The shared prefixes of a workload's prompts, in tokens of whole blocks."""

    prompt_tokens: int
    distinct_tokens: int
    """Tokens of the prompts' full blocks, each prefix counted once: what an unbounded cache would
    hold."""
    known_tokens: int
    """Tokens that an earlier prompt has, too: the most that can be hits."""
    longest_tokens: int


def prefixes_of(prompts: Sequence[Tokens], block_tokens: int) -> Prefixes:
    """`prompts` in the order in which they are sent. The last token of a prompt is always computed,
    so its block is not a hit where the prompt ends with it."""
    seen: set[int] = set()
    known = 0
    for prompt in prompts:
        key = 0
        for at in range(0, len(prompt) - block_tokens + 1, block_tokens):
            key = hash((key, tuple(prompt[at : at + block_tokens])))
            if key in seen and at + block_tokens < len(prompt):
                known += block_tokens
            seen.add(key)
    return Prefixes(
        prompt_tokens=sum(map(len, prompts)),
        distinct_tokens=len(seen) * block_tokens,
        known_tokens=known,
        longest_tokens=max(map(len, prompts)),
    )
