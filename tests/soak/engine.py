"""An engine without computation. The engine checks every byte of its input and writes the bytes
that a real engine would compute. Like a real engine, it runs in its own thread."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.scheduler.actions import RunStep, StepEnded, StepEntry
from moonpool.types import Token
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.messenger import Messenger
from moonpool_engine.worker.engine_thread import begin_writing, send_layer
from tests.soak.content import LAYOUT, names, next_of, slice_bytes


@dataclass(frozen=True)
class Known:
    """The parts of a sequence that are not in its steps: all of its tokens, and its tenant."""

    tokens: Sequence[int]
    tenant: str


class FillingEngine:
    def __init__(
        self,
        arena: Arena,
        messenger: Messenger,
        seed: int,
        post: Callable[[StepEnded], None],
        wrong: Callable[[str], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._arena = arena
        self._messenger = messenger
        self._rng = random.Random(seed)
        self._post = post
        self._wrong = wrong
        self._steps: queue.SimpleQueue[tuple[RunStep, list[Known]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, step: RunStep, known: list[Known]) -> None:
        self._steps.put((step, known))

    def _run(self) -> None:
        while True:
            step, known = self._steps.get()
            try:
                self._post(self._compute(step, known))
            except Exception as error:
                self._wrong(f"the engine failed: {type(error).__name__}: {error}")

    def _compute(self, step: RunStep, known: list[Known]) -> StepEnded:
        began_s = time.monotonic()
        begin_writing(self._messenger, step)
        for entry, one in zip(step.entries, known, strict=True):
            self._check(entry, one)
        named = [names(one.tokens, one.tenant) for one in known]
        sends = [entry for entry in step.entries if entry.sends]
        for layer in range(LAYOUT.num_layers):
            for entry, keys in zip(step.entries, named, strict=True):
                for index in range(entry.start // LAYOUT.block_tokens, len(keys)):
                    place = self._arena.slice(entry.block_ids[index], layer)
                    place[:] = slice_bytes(keys[index], layer)
            send_layer(self._messenger, sends, layer)
            if self._rng.random() < 0.02:
                time.sleep(self._rng.random() * 0.01)
        tokens = [
            None if entry.draw is None else Token(next_of(keys[-1]))
            for entry, keys in zip(step.entries, named, strict=True)
        ]
        for entry in step.entries:
            whole = (entry.start + len(entry.new_token_ids)) // LAYOUT.block_tokens
            self.counts["put"] += whole - entry.start // LAYOUT.block_tokens
        return StepEnded(tokens, time.monotonic() - began_s)

    def _check(self, entry: StepEntry, known: Known) -> None:
        """Checks the blocks of the sequence before this step."""
        keys = names(known.tokens[: entry.start], known.tenant)
        first = 0 if len(entry.new_token_ids) > 1 else max(0, len(keys) - 1)
        for index in range(first, len(keys)):
            block_id = entry.block_ids[index]
            for layer in range(LAYOUT.num_layers):
                if self._arena.slice(block_id, layer) != slice_bytes(keys[index], layer):
                    self._wrong(
                        f"work {entry.attempt_id}: block {index} of {len(keys)} (arena block"
                        f" {block_id}, layer {layer}) is not what its tokens give"
                    )
                    return
        self.counts["get"] += len(keys) - first
