"""Performs an instance's steps in virtual time: the truth of a simulation.

A step takes what the true cost model says. Repeated decode steps are advanced together, up to the
first answer's end, so that a simulation's cost grows with what is scheduled, not with tokens. A
step that reads what still arrives ends a layer's time after the last of it came, if that is later
than its computing. A pipeline of stages runs one step per stage at a time; a step ends when the
last stage is through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moonpool.cost.model import Chunk, StepCost
from moonpool.sim.clock import Clock, Priority, Timer
from moonpool.types import Token
from moonpool.workers.actions import RunStep, StepEnded, StepEntry, StepsEnded
from moonpool.workers.messages import WorkId

EOS_TOKEN_ID = 1
WORD = Token(0)
EOS = Token(EOS_TOKEN_ID)


@dataclass(slots=True)
class EngineFigures:
    """What an engine did. Bubbles are the times it was idle between two steps."""

    num_steps: int = 0
    busy_s: float = 0.0  # of one stage; all have the same
    prefill_tokens: int = 0
    decode_tokens: int = 0
    bubble_s: float = 0.0
    num_bubbles: int = 0
    idle_since_s: float = 0.0


@dataclass(slots=True)
class _Repeated:
    """A decode-only step under way that may be repeated."""

    entries: tuple[StepEntry, ...]
    batch: int
    context_tokens: int
    num_steps: int
    began_s: float
    factor: float
    timer: Timer | None = None


@dataclass(slots=True)
class _Held:
    """A step that cannot end before something has come."""

    layer_s: float  # what is left to compute then, at least
    ended: StepEnded | None = None  # it is computed as far as can be


class SimEngine:
    """One instance's accelerators. `submit` steps; they come back in order through `post`."""

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        num_output_tokens: Callable[[WorkId], int],
        post: Callable[[StepEnded | StepsEnded], None],
        factor: Callable[[bool, bool], float],
        note_prefill: Callable[[WorkId, float], None],
    ) -> None:
        """`num_output_tokens` tells when an answer ends, `factor` how far a step's time departs
        from the model (with prompts in it or not, with an answer that has just begun or not);
        `note_prefill` hears the seconds spent on each prompt."""
        self.figures = EngineFigures()
        self._clock = clock
        self._cost = cost
        self._num_output_tokens = num_output_tokens
        self._post = post
        self._factor = factor
        self._note_prefill = note_prefill
        self._free_s = [0.0] * cost.num_stages
        self._began: dict[WorkId, int] = {}
        self._num_under_way = 0
        self._repeated: _Repeated | None = None
        self._held: _Held | None = None

    @property
    def busy(self) -> bool:
        return self._num_under_way > 0

    @property
    def busy_s(self) -> float:
        """Of one stage until now: of what is under way, the part that is done."""
        now = self._clock.now
        if self._repeated is not None:
            return self.figures.busy_s + now - self._repeated.began_s
        return self.figures.busy_s - max(self._free_s[0] - now, 0.0)

    def submit(self, step: RunStep, held_layers: int = 0) -> tuple[float, float]:
        """Begins a step; returns when its first stage starts and its last one ends. With
        `held_layers`, of so many layers, it does not end before `release`."""
        now = self._clock.now
        figures = self.figures
        if not self._num_under_way and now > figures.idle_since_s and figures.num_steps:
            figures.bubble_s += now - figures.idle_since_s
            figures.num_bubbles += 1
        self._num_under_way += 1
        if step.max_repeats > 1:
            return self._begin_repeated(step)
        chunks: list[Chunk] = []
        batch = context_tokens = num_tokens = 0
        owners: list[WorkId] = []
        begins = False
        for entry in step.entries:
            length = len(entry.new_token_ids)
            num_tokens += length
            if length == 1 and entry.draw is not None and entry.generated:
                batch += 1
                context_tokens += entry.start + 1
                begins = begins or len(entry.generated) == 1
            else:
                chunks.append(self._chunk(entry, length))
                owners.append(entry.work_id)
        factor = self._factor(bool(chunks), begins)
        stage_s = self._cost.step_s(chunks, batch, context_tokens) * factor
        start_s, end_s = self._run_stages(stage_s, num_tokens)
        figures.num_steps += 1
        figures.busy_s += stage_s
        figures.prefill_tokens += num_tokens - batch
        figures.decode_tokens += batch
        # What the decodes would have taken by themselves is not the prompts'.
        alone_s = self._cost.step_s((), batch, context_tokens) * factor if batch and chunks else 0.0
        prefill_s = max(stage_s - alone_s, 0.0) * self._cost.num_stages
        for chunk, owner in zip(chunks, owners, strict=True):
            self._note_prefill(owner, prefill_s * chunk.num_tokens / (num_tokens - batch))
        tokens = tuple(self._draw(entry) for entry in step.entries)
        ended = StepEnded(tokens, end_s - start_s)
        if held_layers:
            assert self._cost.num_stages == 1
            self._held = _Held(stage_s / held_layers)
            self._clock.at(end_s, Priority.STEP_END, self._end_held, self._held, ended)
        else:
            self._clock.at(end_s, Priority.STEP_END, self._end, ended)
        return start_s, end_s

    def release(self, missed: tuple[int, ...]) -> None:
        """What the held step waited for is here, but for the entries that `missed` it."""
        held = self._held
        assert held is not None
        self._held = None
        if held.ended is None:  # it is still computing: `_end_held` takes the rest
            held.ended = StepEnded((), 0.0, missed)
            return
        self._free_s[0] = self._clock.now + held.layer_s
        ended = replace(held.ended, missed=missed)
        self._clock.at(self._free_s[0], Priority.STEP_END, self._end, ended)

    def _end_held(self, held: _Held, ended: StepEnded) -> None:
        if held.ended is None:
            held.ended = ended
        else:
            self._end(replace(ended, missed=held.ended.missed))

    def stop_repeating(self) -> None:
        """Ends the repeated step with the repetition under way."""
        repeated = self._repeated
        if repeated is None:
            return
        elapsed_s = (self._clock.now - repeated.began_s) / repeated.factor
        low, high = 1, repeated.num_steps
        while low < high:
            middle = (low + high) // 2
            if self._repeated_s(repeated, middle) < elapsed_s:
                low = middle + 1
            else:
                high = middle
        if low < repeated.num_steps:
            repeated.num_steps = low
            assert repeated.timer is not None
            repeated.timer.cancel()
            self._set_timer(repeated)

    def forget(self, work_id: WorkId) -> None:
        """The work has ended before its prompt was computed."""
        self._began.pop(work_id, None)

    def _begin_repeated(self, step: RunStep) -> tuple[float, float]:
        assert self._cost.num_stages == 1, "the stages of a pipeline have batches of their own"
        entries = step.entries
        num_steps = step.max_repeats
        context_tokens = 0
        for entry in entries:
            left = self._num_output_tokens(entry.work_id) - len(entry.generated)
            num_steps = min(num_steps, max(left, 1))
            context_tokens += entry.start + 1
        repeated = _Repeated(
            entries,
            len(entries),
            context_tokens,
            num_steps,
            self._clock.now,
            self._factor(False, False),
        )
        self._repeated = repeated
        return repeated.began_s, self._set_timer(repeated)

    def _repeated_s(self, repeated: _Repeated, num_steps: int) -> float:
        return self._cost.decode_steps_s(repeated.batch, repeated.context_tokens, num_steps)

    def _set_timer(self, repeated: _Repeated) -> float:
        duration_s = self._repeated_s(repeated, repeated.num_steps) * repeated.factor
        end_s = max(repeated.began_s + duration_s, self._clock.now)
        repeated.timer = self._clock.at(end_s, Priority.STEP_END, self._end_repeated)
        return end_s

    def _end_repeated(self) -> None:
        repeated = self._repeated
        assert repeated is not None
        self._repeated = None
        num_steps = repeated.num_steps
        seconds = self._clock.now - repeated.began_s
        figures = self.figures
        figures.num_steps += num_steps
        figures.busy_s += seconds
        figures.decode_tokens += num_steps * repeated.batch
        words = (WORD,) * num_steps
        ended = (*words[1:], EOS)
        tokens = [
            ended
            if self._num_output_tokens(entry.work_id) <= len(entry.generated) + num_steps
            else words
            for entry in repeated.entries
        ]
        self._end(StepsEnded(tokens, seconds))

    def _end(self, event: StepEnded | StepsEnded) -> None:
        self._num_under_way -= 1
        self.figures.idle_since_s = self._clock.now
        self._post(event)

    def _run_stages(self, stage_s: float, num_tokens: int) -> tuple[float, float]:
        """Books the step on all stages; returns when it starts and ends."""
        free_s = self._free_s
        start_s = end_s = max(self._clock.now, free_s[0])
        hop_s = self._cost.hop_s(num_tokens) if len(free_s) > 1 else 0.0
        for stage in range(len(free_s)):
            if stage:
                end_s += hop_s
            end_s = max(end_s, free_s[stage]) + stage_s
            free_s[stage] = end_s
        return start_s, end_s

    def _chunk(self, entry: StepEntry, num_tokens: int) -> Chunk:
        began = self._began.setdefault(entry.work_id, entry.start)
        last = entry.draw is not None
        if last:
            del self._began[entry.work_id]
        return Chunk(num_tokens, entry.start, min(began, entry.start), last)

    def _draw(self, entry: StepEntry) -> Token | None:
        if entry.draw is None:
            return None
        ends = self._num_output_tokens(entry.work_id) <= len(entry.generated) + 1
        return EOS if ends else WORD
