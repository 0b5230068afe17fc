"""Simulates a draft model in virtual time, with a given acceptance rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from moonpool.cost.model import Chunk, StepCost
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import DraftTask, StepEntry
from moonpool.scheduler.speculation.draft_model import READY_TOKENS

ANY_TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Decides which drafts are right: each with this probability, if all drafts before it are.

    The decision depends only on the seed, the request and the position in its text. So another
    attempt and another schedule get the same decision.
    """

    probability: float
    seed: int = 0

    def right(self, attempt_id: AttemptId, position: int) -> bool:
        """Whether a guess of the token at this position is right."""
        request_id = attempt_id.partition("/")[0]
        place = f"{self.seed} {request_id} {position}".encode()
        drawn = int.from_bytes(blake2b(place, digest_size=4).digest(), "little")
        return drawn < self.probability * 2**32


class SimDrafter:
    """Runs the draft tasks of a step like `moonpool_engine.engine.drafting.drafter.Drafter`."""

    def __init__(
        self,
        cost: StepCost,
        acceptance: Acceptance,
        num_output_tokens: Callable[[AttemptId], int],
    ) -> None:
        self._cost = cost
        self._acceptance = acceptance
        self._num_output_tokens = num_output_tokens

    def run(
        self, entries: Sequence[StepEntry]
    ) -> tuple[tuple[StepEntry, ...], Mapping[int, tuple[int, ...]], float]:
        """Returns the entries with their drafts, the guesses by entry, and the seconds."""
        tasks = {i: task for i, entry in enumerate(entries) if (task := entry.draft_task)}
        if not tasks:
            return tuple(entries), {}, 0.0
        rounds = {i: self._rounds(entries[i], task) for i, task in tasks.items()}
        drafted = {i: (ANY_TOKEN_ID,) * number for i, (number, _) in rounds.items()}
        changed = tuple(
            [
                entry.with_drafts(drafted[i]) if i in drafted else entry
                for i, entry in enumerate(entries)
            ]
        )
        seconds = self._first_round_s(list(tasks.values()))
        for number in range(1, max(count for _, count in rounds.values())):
            going = [tasks[i] for i, (_, count) in rounds.items() if count > number]
            context_tokens = sum(task.start + len(task.token_ids) + number for task in going)
            seconds += self._cost.step_s((), len(going), context_tokens)
        return changed, drafted, seconds

    def _rounds(self, entry: StepEntry, task: DraftTask) -> tuple[int, int]:
        """Returns the number of guesses, and of rounds that the guesses take. A right guess of the
        token that ends the answer is the last guess, and is not handed on."""
        left = self._num_output_tokens(entry.attempt_id) - len(entry.generated)
        for number in range(1, task.num_drafts + 1):
            if not self._acceptance.right(entry.attempt_id, entry.start + number):
                break
            if number == left:
                return number - 1, number
        return task.num_drafts, max(task.num_drafts, 1)

    def _first_round_s(self, tasks: Sequence[DraftTask]) -> float:
        """Returns the seconds of the first round, in which the draft model computes the rows that
        it lacks of each request: a few rows, or a chunk."""
        chunks, rows, context_tokens = [], 0, 0
        for task in tasks:
            number = len(task.token_ids)
            if number > READY_TOKENS:
                chunks.append(Chunk(number, task.start, task.start, True))
            else:
                rows += number
                context_tokens += task.start + number
        return self._cost.step_s(chunks, rows, context_tokens)
