"""Runs the steps of a simulated instance in virtual time.

A step takes the time of the ground-truth cost model. Repeated decode steps are advanced together up
to the end of the first answer, so the cost of a simulation grows with scheduled steps, not tokens.
If blocks that a step reads are still being transferred, the step ends when it is computed, or one
layer's time after the last block arrived, whichever is later. A pipeline runs one step per stage at
a time, and a step ends when its last stage ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from moonpool.cost.domain import CostDomain
from moonpool.cost.model import Chunk, StepCost
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import RunStep, StepEnded, StepEntry, StepsEnded
from moonpool.sim.clock import Clock, Priority, Timer
from moonpool.sim.drafter import Acceptance, SimDrafter
from moonpool.types import Token

EOS_TOKEN_ID = 1
ANY_TOKEN = Token(0)
EOS = Token(EOS_TOKEN_ID)
NEVER = Acceptance(0.0)
NO_DRAFTS: Mapping[int, tuple[int, ...]] = MappingProxyType({})


@dataclass(slots=True)
class EngineFigures:
    """The totals of one engine. A bubble is the idle time between two steps. Tokens count as
    outside if the cost was not measured for a prompt, or a batch of decodes, of this size."""

    num_steps: int = 0
    busy_s: float = 0.0  # time of one stage; stages are equal, but the first has the draft model
    drafting_s: float = 0.0  # time of the draft model
    prefill_tokens: int = 0
    decode_tokens: int = 0
    outside_prefill_tokens: int = 0
    outside_decode_tokens: int = 0
    bubble_s: float = 0.0
    num_bubbles: int = 0
    idle_since_s: float = 0.0


@dataclass(slots=True)
class _Repeated:
    """A decode step under way that represents `num_steps` equal steps."""

    entries: tuple[StepEntry, ...]
    batch: int
    context_tokens: int
    num_steps: int
    began_s: float
    factor: float
    timer: Timer | None = None


@dataclass(slots=True)
class _Held:
    """A step that cannot end before the blocks that it reads have arrived."""

    layer_s: float  # least time to compute after the last block has arrived
    # set by whichever comes first, the end of computing or the release
    ended: StepEnded | None = None


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """`domain` holds the sizes that the cost was measured for. `acceptance` decides which drafts
    are right. `drafter` is the draft model."""

    domain: CostDomain | None = None
    acceptance: Acceptance = NEVER
    drafter: SimDrafter | None = None


PLAIN = EngineTraits()


class SimEngine:
    """The accelerators of one instance. Submitted steps end in order, each with one event."""

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        num_output_tokens: Callable[[AttemptId], int],
        num_prompt_tokens: Callable[[AttemptId], int],
        post: Callable[[StepEnded | StepsEnded], None],
        factor: Callable[[bool, bool], float],
        note_prefill: Callable[[AttemptId, float], None],
        traits: EngineTraits = PLAIN,
    ) -> None:
        """`num_output_tokens` is the length of an answer. `num_prompt_tokens` is the length of a
        prompt, or 0 if unknown. `factor` multiplies the time of a step (see `StepFactor`).
        `note_prefill` takes the compute time spent on a prompt."""
        self.figures = EngineFigures()
        self._clock = clock
        self._cost = cost
        self._num_output_tokens = num_output_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._domain = traits.domain
        self._acceptance = traits.acceptance
        self._drafter = traits.drafter
        self._post = post
        self._factor = factor
        self._note_prefill = note_prefill
        self._free_s = [0.0] * cost.num_stages
        self._began: dict[AttemptId, int] = {}
        self._num_under_way = 0
        self._repeated: _Repeated | None = None
        self._held: _Held | None = None

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._num_under_way > 0

    @property
    def num_begun(self) -> int:
        """The number of prompts that are begun and not complete."""
        return len(self._began)

    @property
    def busy_s(self) -> float:
        """The compute time of one stage until now, including the finished part of this step."""
        now = self._clock.now
        if self._repeated is not None:
            return self.figures.busy_s + now - self._repeated.began_s
        return self.figures.busy_s - max(self._free_s[0] - now, 0.0)

    def submit(self, step: RunStep, held_layers: int = 0) -> tuple[float, float]:
        """Starts a step; returns the start of its first stage and the end of its last one.

        With `held_layers` (the number of layers), the step does not end before `release`.
        """
        now = self._clock.now
        figures = self.figures
        if not self._num_under_way and now > figures.idle_since_s and figures.num_steps:
            figures.bubble_s += now - figures.idle_since_s
            figures.num_bubbles += 1
        self._num_under_way += 1
        if step.max_repeats > 1:
            return self._begin_repeated(step)
        entries, drafted, drafting_s = step.entries, NO_DRAFTS, 0.0
        if self._drafter is not None:
            entries, drafted, drafting_s = self._drafter.run(entries)
        chunks: list[Chunk] = []
        batch = context_tokens = num_tokens = 0
        owners: list[AttemptId] = []
        begins = False
        for entry in entries:
            length = len(entry.new_token_ids)
            num_tokens += length
            generated = entry.generated
            if generated and length == 1 + entry.num_drafts and entry.draw is not None:
                batch += length
                context_tokens += entry.start + 1
                begins = begins or len(generated) == 1
            else:
                chunks.append(self._chunk(entry, length))
                owners.append(entry.attempt_id)
        factor = self._factor(bool(chunks), begins)
        stage_s = self._cost.step_s(chunks, batch, context_tokens) * factor
        drafting_s *= factor
        start_s, end_s = self._run_stages(stage_s, num_tokens, drafting_s)
        figures.num_steps += 1
        figures.busy_s += stage_s + drafting_s
        figures.drafting_s += drafting_s
        figures.prefill_tokens += num_tokens - batch
        figures.decode_tokens += batch
        self._note_outside(chunks, batch, context_tokens, batch)
        # Prefill is charged only for the time beyond the time of the decodes alone.
        alone_s = self._cost.step_s((), batch, context_tokens) * factor if batch and chunks else 0.0
        prefill_s = max(stage_s - alone_s, 0.0) * self._cost.num_stages
        for chunk, owner in zip(chunks, owners, strict=True):
            self._note_prefill(owner, prefill_s * chunk.num_tokens / (num_tokens - batch))
        tokens: list[Token | None] = []
        further: dict[int, tuple[Token, ...]] = {}
        for index, entry in enumerate(entries):
            if entry.draw is None:
                tokens.append(None)
            elif not entry.num_drafts:
                left = self._num_output_tokens(entry.attempt_id) - len(entry.generated)
                tokens.append(ANY_TOKEN if left > 1 else EOS)
            else:
                first, *others = self._draw(entry)
                tokens.append(first)
                if others:
                    further[index] = tuple(others)
        ended = StepEnded(tuple(tokens), end_s - start_s, further=further, drafted=drafted)
        if held_layers:
            assert self._cost.num_stages == 1
            self._held = _Held(stage_s / held_layers)
            self._clock.at(end_s, Priority.STEP_END, self._end_held, self._held, ended)
        else:
            self._clock.at(end_s, Priority.STEP_END, self._end, ended)
        return start_s, end_s

    def release(self, missed: tuple[int, ...]) -> None:
        """Lets the held step end: its blocks have arrived, except those of the entries `missed`."""
        held = self._held
        assert held is not None
        self._held = None
        if held.ended is None:  # as long as the step is still computed, `_end_held` ends it later
            held.ended = StepEnded((), 0.0, missed)
            return
        self._free_s[0] = self._clock.now + held.layer_s
        ended = msgspec.structs.replace(held.ended, missed=missed)
        self._clock.at(self._free_s[0], Priority.STEP_END, self._end, ended)

    def _end_held(self, held: _Held, ended: StepEnded) -> None:
        if held.ended is None:
            held.ended = ended
        else:
            self._end(msgspec.structs.replace(ended, missed=held.ended.missed))

    def stop_repeating(self) -> None:
        """Ends the repeated step at the end of the current repetition."""
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

    def forget(self, attempt_id: AttemptId) -> None:
        """Drops an attempt that ended before its prompt was computed."""
        self._began.pop(attempt_id, None)

    def _begin_repeated(self, step: RunStep) -> tuple[float, float]:
        assert self._cost.num_stages == 1, "a pipeline does not repeat steps"
        entries = step.entries
        num_steps = step.max_repeats
        context_tokens = 0
        for entry in entries:
            left = self._num_output_tokens(entry.attempt_id) - len(entry.generated)
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
        self._note_outside((), repeated.batch, repeated.context_tokens, num_steps * repeated.batch)
        tokens_until_end = (ANY_TOKEN,) * num_steps
        ended = (*tokens_until_end[1:], EOS)
        tokens = [
            ended
            if self._num_output_tokens(entry.attempt_id) <= len(entry.generated) + num_steps
            else tokens_until_end
            for entry in repeated.entries
        ]
        self._end(StepsEnded(tokens, seconds))

    def _end(self, event: StepEnded | StepsEnded) -> None:
        self._num_under_way -= 1
        self.figures.idle_since_s = self._clock.now
        self._post(event)

    def _run_stages(
        self, stage_s: float, num_tokens: int, drafting_s: float
    ) -> tuple[float, float]:
        """Occupies all stages with the step, and the first with the draft model before it; returns
        its start and end."""
        free_s = self._free_s
        start_s = max(self._clock.now, free_s[0])
        end_s = start_s + drafting_s
        hop_s = self._cost.hop_s(num_tokens) if len(free_s) > 1 else 0.0
        for stage in range(len(free_s)):
            if stage:
                end_s += hop_s
            end_s = max(end_s, free_s[stage]) + stage_s
            free_s[stage] = end_s
        return start_s, end_s

    def _chunk(self, entry: StepEntry, num_tokens: int) -> Chunk:
        began = self._began.setdefault(entry.attempt_id, entry.start)
        last = entry.draw is not None
        if last:
            del self._began[entry.attempt_id]
        prompt_tokens = self._num_prompt_tokens(entry.attempt_id)
        return Chunk(num_tokens, entry.start, min(began, entry.start), last, prompt_tokens)

    def _note_outside(
        self, chunks: Sequence[Chunk], batch: int, context_tokens: int, decoded: int
    ) -> None:
        """Counts the tokens of a step whose sizes the cost was not measured for."""
        domain, figures = self._domain, self.figures
        if domain is None:
            return
        for chunk in chunks:
            prompt_tokens = max(chunk.prompt_tokens, chunk.start + chunk.num_tokens)
            if not domain.has_prompt(prompt_tokens, chunk.cached_tokens):
                figures.outside_prefill_tokens += chunk.num_tokens
        if batch and not domain.has_decodes(batch, context_tokens):
            figures.outside_decode_tokens += decoded

    def _draw(self, entry: StepEntry) -> tuple[Token, ...]:
        """Returns the tokens of an entry: its right drafts, and one token of the model itself."""
        left = self._num_output_tokens(entry.attempt_id) - len(entry.generated)
        num_tokens = 1
        right = self._acceptance.right
        while num_tokens <= entry.num_drafts and right(entry.attempt_id, entry.start + num_tokens):
            num_tokens += 1
        if left > num_tokens:
            return (ANY_TOKEN,) * num_tokens
        return (*(ANY_TOKEN,) * (left - 1), EOS)
