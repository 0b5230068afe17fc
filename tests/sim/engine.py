"""A fake engine, which compares its input and the blocks that it reads with the truth, layer by
layer.

It follows the contract of `moonpool.scheduler.actions` exactly. The engine reads a layer of an
arriving block only when that layer is present. If a layer never comes, the results of that entry
are garbage from this layer on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import (
    ArenaBack,
    ArenaLost,
    Arriving,
    RunStep,
    StepEnded,
    StepEntry,
    StepFailed,
    StepsEnded,
)
from moonpool.types import BlockId, Token
from tests.sim.loads import LoadOperation
from tests.sim.messenger import GARBAGE, FetchOperation

if TYPE_CHECKING:
    from tests.sim.node import Life

LOOKS_EVERY_S = 0.003


@dataclass(eq=False)
class _Share:
    """Holds one entry, with a copy of its input, which must not change during the step."""

    entry: StepEntry
    block_ids: tuple[BlockId, ...]
    new_token_ids: tuple[int, ...]
    waits_for: list[FetchOperation | LoadOperation]
    until_s: float
    missed: bool = False

    def brought(self, layer: int) -> bool | None:
        found = [operation.brought(layer) for operation in self.waits_for]
        return False if False in found else None if None in found else True


@dataclass(eq=False)
class _Run:
    number: int
    shares: list[_Share]
    times_s: list[float]  # the time at which each layer is computed
    ends_s: float
    outcome: StepEnded | StepsEnded | StepFailed

    @property
    def waits(self) -> bool:
        return any(share.waits_for for share in self.shares)


class FakeEngine:
    def __init__(self, life: Life) -> None:
        self.life = life
        self.clock = life.clock
        self.world = life.world
        self._stages_free_s = [0.0] * self.world.options.num_stages
        self._num_steps = 0
        self._last_step = 0
        # maps an attempt to (step, index of the first garbage token)
        self._spoiled: dict[AttemptId, tuple[int, int]] = {}

    def run(self, step: RunStep) -> None:
        under_way = self.world.instance_config.max_steps_in_flight
        assert self._num_steps < under_way, "too many steps at a time"
        self._num_steps += 1
        self._last_step += 1
        repeats = self.clock.rng.randint(1, step.max_repeats)
        drawn = [self._draw(entry, repeats) for entry in step.entries]
        repeats = min((len(tokens) for tokens in drawn if tokens), default=1)
        shares = [
            self._share(entry, (*entry.new_token_ids, *tokens[: repeats - 1]))
            for entry, tokens in zip(step.entries, drawn, strict=True)
        ]
        failed = self.world.chance("step_failure_rate")
        times_s = self._times_s(failed)
        ends_s = max(times_s[-1], self._stages_free_s[-1])  # a step ends after the steps before it
        self._stages_free_s[-1] = ends_s
        seconds = ends_s - self.clock.now
        outcome: StepEnded | StepsEnded | StepFailed
        arenas = self.world.options.arenas
        if arenas and self.world.chance("arena_loss_rate"):
            outcome = self._lose_arena(self.clock.rng.randrange(len(arenas)), ends_s)
        elif failed:
            for entry in step.entries:
                self._spoiled.setdefault(entry.attempt_id, (self._last_step, entry.start))
            outcome = StepFailed("the engine failed")
        elif step.max_repeats > 1:
            outcome = StepsEnded([tuple(map(Token, t[:repeats])) for t in drawn], seconds)
        else:
            tokens = tuple(Token(t[0]) if t else None for t in drawn)
            outcome = StepEnded(tokens, seconds)
        run = _Run(self._last_step, shares, times_s, ends_s, outcome)
        if run.waits:
            self.clock.at(times_s[0], lambda: self._run_layer(run, 0))
            return
        for layer, time_s in enumerate(times_s):
            self.clock.at(time_s, lambda layer=layer: self._run_layer(run, layer))
        self.clock.at(ends_s, lambda: self._end(run))

    def _lose_arena(self, arena: int, when_s: float) -> StepFailed:
        """Fails a step because of a lost arena. The instance receives `ArenaLost` before or after
        that, and later `ArenaBack`."""
        rng = self.clock.rng
        lost_s = when_s + rng.choice((-0.0001, 0.001))
        self.clock.at(lost_s, lambda: self.life.post(ArenaLost(arena, "the arena is gone")))
        back_s = lost_s + rng.choice((0.001, 0.1, 2.0)) * rng.random()
        self.clock.at(back_s, lambda: self.life.post(ArenaBack(arena)))
        return StepFailed("an arena is gone", lost_arena=arena)

    def _times_s(self, failed: bool) -> list[float]:
        """Returns the time at which each layer is done if no layer has to wait. A step that fails
        may end between two layers."""
        time_s = self.clock.now
        stages, num_layers = len(self._stages_free_s), self.life.num_layers
        times_s = []
        for layer in range(num_layers):
            stage = layer * stages // num_layers
            time_s = max(time_s, self._stages_free_s[stage])
            time_s += 0.0005 + self.clock.delay_s(self.world.options.slow_delay_s)
            self._stages_free_s[stage] = time_s
            times_s.append(time_s)
            if failed and self.clock.rng.random() < 0.5:
                break
        return times_s

    def _share(self, entry: StepEntry, new_token_ids: tuple[int, ...]) -> _Share:
        arriving = entry.arriving
        waits_for = [] if arriving is None else self._operations(arriving)
        until_s = self.clock.now + (0.0 if arriving is None else arriving.timeout_s)
        return _Share(entry, tuple(entry.block_ids), new_token_ids, waits_for, until_s)

    def _operations(self, arriving: Arriving) -> list[FetchOperation | LoadOperation]:
        self.world.seen["early steps"] += 1
        loads = [self.life.loads[load_id] for load_id in arriving.load_ids]
        self.world.seen["early steps by load"] += bool(loads)
        return [self.life.fetches[arriving.fetch_id], *loads] if arriving.fetch_id else [*loads]

    def _draw(self, entry: StepEntry, repeats: int) -> tuple[int, ...]:
        """Checks the entry's tokens against the truth. Returns the tokens to draw, if any."""
        truth = self.world.truth_of(entry.attempt_id)
        end = entry.start + len(entry.new_token_ids)
        assert len(entry.new_token_ids) > 0
        assert truth.tokens[entry.start : end] == tuple(entry.new_token_ids)
        if entry.draw is None:
            return ()
        assert entry.draw == truth.request.sampling
        assert truth.tokens[truth.request.num_prompt_tokens : end] == tuple(entry.generated)
        assert end < len(truth.tokens), "computes past the end of the answer"
        return truth.tokens[end : end + repeats]

    def _run_layer(self, run: _Run, layer: int) -> None:
        """Stores a layer, then attends to it. A step that waits schedules its next layer itself."""
        if not self.life.alive:
            return
        size = self.life.layout.block_tokens
        for share in run.shares:
            entry = share.entry
            truth = self.world.truth_of(entry.attempt_id)
            end = entry.start + len(share.new_token_ids)
            for index in range(entry.start // size, self.life.layout.blocks_for(end)):
                right = truth.slice_content(layer, index, end, size)
                self.life.write(share.block_ids[index], layer, GARBAGE if share.missed else right)
            for index, block_id in entry.sends:
                assert share.block_ids[index] == block_id
                if entry.attempt_id in self.life.sends and not share.missed:
                    self.life.sends[entry.attempt_id].put((index, layer, block_id))
        self._attend_layer(run, layer)

    def _attend_layer(self, run: _Run, layer: int) -> None:
        """Computes attention as soon as each block has this layer, or will never get it."""
        if not self.life.alive:
            return
        for share in run.shares:
            if share.missed:
                continue
            brought = share.brought(layer)
            if brought is None and self.clock.now < share.until_s:
                self.clock.after(LOOKS_EVERY_S, lambda: self._attend_layer(run, layer))
                return
            share.missed = not brought
        for share in run.shares:
            if not share.missed:
                self._read_layer(share, layer, run.number)
        if not run.waits:
            return  # The clock schedules the ends of the other layers.
        now = self.clock.now
        if layer + 1 < len(run.times_s):
            next_s = max(run.times_s[layer + 1], now)
            self.clock.at(next_s, lambda: self._run_layer(run, layer + 1))
        else:
            self.clock.at(max(run.ends_s, now), lambda: self._end(run))

    def _read_layer(self, share: _Share, layer: int, number: int) -> None:
        entry, size = share.entry, self.life.layout.block_tokens
        truth = self.world.truth_of(entry.attempt_id)
        for index in range(self.life.layout.blocks_for(entry.start)):
            end = entry.start + len(share.new_token_ids)
            right = truth.slice_content(layer, index, end, size)
            # Steps that were in progress behind a failed step compute garbage.
            failed, first = self._spoiled.get(entry.attempt_id, (number, 0))
            if failed < number and index >= first // size:
                self.life.write(share.block_ids[index], layer, GARBAGE)
                continue
            found = self.life.read(share.block_ids[index], layer)
            assert found == right, f"{entry.attempt_id}: block {index} is not what it should be"

    def _end(self, run: _Run) -> None:
        self._num_steps -= 1
        outcome = run.outcome
        missed = tuple(i for i, share in enumerate(run.shares) if share.missed)
        if isinstance(outcome, StepEnded):
            self.world.seen["missed shares"] += len(missed)
            outcome = StepEnded(outcome.tokens, outcome.seconds, missed)
        self.life.post(outcome)
