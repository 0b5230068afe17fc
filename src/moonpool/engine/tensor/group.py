"""How the ranks of an instance add up what their shards give, and meet.

The sum of all shards is a tree of single additions, by the shards' numbers: it has the same bits
whichever rank has which shards, as long as a rank's are a branch of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from moonpool.engine.stages.fellows import StageLostError

SILENCE_S = 120.0
"""How long a rank waits for another, in the middle of a step too."""


class RankLostError(StageLostError):
    """The ranks cannot go on together: one has ended, failed or fallen silent."""


class Group(Protocol):
    """The ranks, seen from one of them. Every rank makes the same calls in the same order; each
    raises RankLostError when another rank does not."""

    num_ranks: int
    waited_s: float
    """In all sums: the others' time and the transport's."""

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Of the parts of all ranks' shards, to all ranks. May overwrite `parts`."""
        ...

    def share(self, tensor: Tensor) -> None:
        """The first rank's, to all ranks, in place."""
        ...

    def meet(self) -> None:
        """Returns when all ranks have come here."""
        ...

    def end(self) -> None:
        """One is gone: nobody is to wait for it. From any thread."""
        ...


class Alone:
    """All shards in one process."""

    num_ranks = 1
    waited_s = 0.0

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        return add_up(parts)

    def share(self, tensor: Tensor) -> None:
        """Nobody else needs it."""

    def meet(self) -> None:
        """Nobody else comes."""

    def end(self) -> None:
        """Nobody waits."""


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """((a + b) + (c + d)) ..., for a power of two of them, rounded to their dtype at every `+`.
    Overwrites them."""
    level = list(parts)
    while len(level) > 1:
        level = [a.add_(b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]
