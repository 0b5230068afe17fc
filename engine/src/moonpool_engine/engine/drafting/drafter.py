"""Runs a draft model: it guesses the tokens that a step of the instance's model then verifies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import DraftTask, StepEntry
from moonpool.types import BlockId
from moonpool_engine.engine.builtin import LoadedModel
from moonpool_engine.engine.ops import Ops, empty_cache
from moonpool_engine.engine.runner import Engine, make_layout


class Drafter:
    """A draft model with KVCache of its own, which no other process reads."""

    def __init__(
        self, model: LoadedModel, ops: Ops, num_blocks: int, block_tokens: int, vocab_size: int
    ) -> None:
        """The drafter guesses tokens below `vocab_size`, that of the verifying model."""
        layout = make_layout(model, block_tokens, ops)
        self.engine = Engine(model, ops, empty_cache(layout, num_blocks))
        self.num_bytes = num_blocks * layout.block_bytes
        self._vocab_size = min(vocab_size, model.spec.vocab_size)
        self._own_vocab_size = model.spec.vocab_size

    def run(
        self, entries: Sequence[StepEntry]
    ) -> tuple[list[StepEntry], Mapping[int, tuple[int, ...]], float]:
        """Does the entries' draft tasks. Returns the entries with their drafts, the guessed tokens
        by entry, and the seconds. Raises `StepError` as the engine does."""
        tasks = {i: entry.draft_task for i, entry in enumerate(entries) if entry.draft_task}
        if not tasks:
            return list(entries), {}, 0.0
        began_s = time.perf_counter()
        guessed = self._guess({i: task for i, task in tasks.items() if self._knows(task)})
        drafted = {i: tuple(guessed.get(i, ())) for i in tasks}
        changed = [
            entry.with_drafts(drafted[i]) if i in drafted else entry
            for i, entry in enumerate(entries)
        ]
        return changed, drafted, time.perf_counter() - began_s

    def _knows(self, task: DraftTask) -> bool:
        """Whether the tokens are in the draft model's vocabulary, which may be padded less."""
        return max(task.token_ids) < self._own_vocab_size

    def _guess(self, tasks: Mapping[int, DraftTask]) -> dict[int, list[int]]:
        guessed: dict[int, list[int]] = {i: [] for i in tasks}
        going = {i: (task.token_ids, task.start) for i, task in tasks.items()}
        while going:
            new = self._next_tokens([_entry(tasks[i], *rows) for i, rows in going.items()])
            still: dict[int, tuple[Sequence[int], int]] = {}
            for (i, (token_ids, start)), token_id in zip(going.items(), new, strict=True):
                task, found = tasks[i], guessed[i]
                if len(found) < task.num_drafts and token_id not in task.end_token_ids:
                    found.append(token_id)
                    if len(found) < task.num_drafts:
                        still[i] = (token_id,), start + len(token_ids)
            going = still
        return guessed

    def _next_tokens(self, entries: Sequence[StepEntry]) -> list[int]:
        logits = self.engine.logits(entries)[:, : self._vocab_size]
        found: list[int] = logits.argmax(dim=-1).tolist()
        return found


def _entry(task: DraftTask, token_ids: Sequence[int], start: int) -> StepEntry:
    blocks = [BlockId(block) for block in task.block_ids]
    return StepEntry(AttemptId("draft"), token_ids, start, blocks, draw=None)
