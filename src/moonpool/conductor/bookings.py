"""The Conductor's books: what is booked where, and booked off again.

Each attempt is in the sums of the fleet, in the index's expectations and in the forecast exactly
while it is booked, and `validate` can tell. Nothing here chooses, sends or answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.conductor.decode_forecast import Forecast, Stay
from moonpool.conductor.fleet import Fleet
from moonpool.conductor.state import Attempt, InstanceState, Stage, Tracked
from moonpool.kvcache.prefix_index import PrefixIndex
from moonpool.types import InstanceId
from moonpool.workers.messages import InstanceInfo


class Bookings:
    def __init__(self, forecast: Forecast) -> None:
        self.fleet = Fleet()
        self.index = PrefixIndex()
        self.forecast = forecast
        self.instances: dict[InstanceId, InstanceState] = {}

    def join(self, info: InstanceInfo) -> InstanceState:
        row = self.index.add_instance(info.instance_id, info.incarnation, info.num_blocks)
        self.fleet.join(row, info)
        state = InstanceState(info, row)
        self.instances[info.instance_id] = state
        return state

    def leave(self, instance_id: InstanceId) -> InstanceState | None:
        """What was booked there is nowhere any more, but for the attempts' own words on it."""
        state = self.instances.pop(instance_id, None)
        if state is None:
            return None
        for tracked in state.prefills.values():
            assert tracked.attempt is not None
            self.index.unexpect(instance_id, tracked.attempt.expected_keys)
        self.index.remove_instance(instance_id)
        self.fleet.leave(state.row)
        for attempt in state.serving.values():
            attempt.fetch_from = None  # the fetch fails by itself, and is computed instead
        return state

    def book(self, tracked: Tracked, attempt: Attempt, now: float) -> None:
        """The whole attempt, on all instances that it names (mutates)."""
        work_id, fleet = attempt.work_id, self.fleet
        prefill, decoder = self.instances[attempt.prefill], self.instances[attempt.decoder]
        prefill.prefills[work_id] = tracked
        fleet.waiting_ns[prefill.row] += attempt.prefill_ns
        self.index.expect(attempt.prefill, attempt.expected_keys)
        fleet.last_placed_s[prefill.row] = fleet.last_placed_s[decoder.row] = now
        if attempt.booked_tokens:
            fleet.room_tokens[decoder.row] -= attempt.booked_tokens
        if attempt.answers:
            decoder.decodes[work_id] = tracked
            fleet.book_decode(decoder.row, attempt.num_tokens)
        if attempt.fetch_from is not None:
            source = self.instances[attempt.fetch_from]
            source.serving[work_id] = attempt
            fleet.num_serving[source.row] += 1

    def start_prefill(self, attempt: Attempt, now: float) -> None:
        state = self.instances[attempt.prefill]
        if attempt.work_id not in state.prefills or attempt.started_s is not None:
            return
        attempt.started_s = now
        state.started[attempt.work_id] = attempt
        self.fleet.waiting_ns[state.row] -= attempt.prefill_ns
        self.fleet.busy_until_s[state.row] = state.busy_until_s()

    def rescale_prefills(self, state: InstanceState, factor: float) -> None:
        """What is booked there takes so many times as long as was believed: it is the queue of all
        that come now."""
        waiting_ns = 0
        for tracked in state.prefills.values():
            attempt = tracked.attempt
            assert attempt is not None
            attempt.prefill_ns = round(attempt.prefill_ns * factor)
            waiting_ns += attempt.prefill_ns if attempt.started_s is None else 0
        self.fleet.waiting_ns[state.row] = waiting_ns
        self.fleet.busy_until_s[state.row] = state.busy_until_s()

    def end_prefill(self, tracked: Tracked, attempt: Attempt, now: float) -> None:
        """Books the prefill half off, if it is still booked."""
        state = self.instances.get(attempt.prefill)
        if state is not None:
            if state.prefills.pop(attempt.work_id, None) is None:
                return
            self._end_prefill_at(state, attempt, now)
            self.index.unexpect(attempt.prefill, attempt.expected_keys)
            if attempt.decode is not None:
                state.handed_over[attempt.work_id] = tracked
        if attempt.fetch_from is not None:
            source = self.instances[attempt.fetch_from]
            del source.serving[attempt.work_id]
            self.fleet.num_serving[source.row] -= 1
            attempt.fetch_from = None

    def _end_prefill_at(self, state: InstanceState, attempt: Attempt, now: float) -> None:
        if attempt.started_s is None:
            self.fleet.waiting_ns[state.row] -= attempt.prefill_ns
            return
        if next(iter(state.started)) == attempt.work_id:
            state.freed_s = now
        del state.started[attempt.work_id]
        self.fleet.busy_until_s[state.row] = state.busy_until_s()

    def begin_decoding(self, attempt: Attempt, now: float) -> None:
        attempt.stage = Stage.DECODE
        attempt.decoding_since_s = now
        if attempt.answers:
            self.fleet.begin_decoding(self.instances[attempt.decoder].row, attempt.num_tokens)

    def add_tokens(self, attempt: Attempt, num_tokens: int) -> int:
        """More of an answer that is being decoded; returns the room that it takes beyond what was
        booked. Sums of both go to `fleet.grow`, once for all answers of a step."""
        attempt.num_tokens += num_tokens
        lacking = attempt.num_tokens + 1 - attempt.booked_tokens
        if lacking <= 0:
            return 0
        # In whole blocks, as it is held: an answer may turn out longer than was booked for it.
        extra = self.instances[attempt.decoder].info.layout.blocks_for(lacking)
        extra *= self.instances[attempt.decoder].info.layout.block_tokens
        attempt.booked_tokens += extra
        return extra

    def unbook(self, tracked: Tracked, attempt: Attempt, now: float) -> None:
        """Everything that is still booked of the attempt."""
        self.end_prefill(tracked, attempt, now)
        if attempt.stay is not None:
            self.forecast.leave(attempt.stay, now)
            attempt.stay = None
        prefill = self.instances.get(attempt.prefill)
        if prefill is not None:
            prefill.handed_over.pop(attempt.work_id, None)
        state = self.instances.get(attempt.decoder)
        if state is None:
            return
        if attempt.booked_tokens:
            self.fleet.room_tokens[state.row] += attempt.booked_tokens
        if state.decodes.pop(attempt.work_id, None) is not None:
            self.fleet.book_decode(state.row, attempt.num_tokens, -1)
            if attempt.stage is Stage.DECODE:
                self.fleet.end_decoding(state.row, attempt.num_tokens)

    def validate(self, requests: Iterable[Tracked]) -> None:
        """Asserts that every sum is what the attempts add up to."""
        self.index.validate()
        books: dict[str, _Book] = {name: _Book() for name in self.instances}
        stays: list[Stay] = []
        for tracked in requests:
            attempt = tracked.attempt
            assert attempt is not None
            _add_up(tracked, attempt, books, stays)
        self.forecast.validate(stays)
        fleet = self.fleet
        for instance_id, state in self.instances.items():
            row, book = state.row, books[instance_id]
            assert fleet.ids[row] == instance_id
            role, serves = state.info.role, state.drain is None
            assert fleet.prefills[row] == (serves and role.prefills)
            assert fleet.decodes[row] == (serves and role.decodes)
            assert book.prefills == set(state.prefills)
            assert book.decodes == set(state.decodes)
            assert book.handed_over >= set(state.handed_over)  # a life ago, the rest
            assert book.serving == set(state.serving)
            assert book.serving_count == fleet.num_serving[row]
            assert book.waiting_ns == fleet.waiting_ns[row]
            booked_tokens = book.booked_tokens + sum(state.taking.values())
            assert booked_tokens == fleet.capacity_tokens[row] - fleet.room_tokens[row]
            assert (book.batch, book.context) == (
                fleet.booked_batch[row],
                fleet.booked_context[row],
            )
            assert (book.decoding, book.decoding_context) == (
                fleet.decoding_batch[row],
                fleet.decoding_context[row],
            )
            assert fleet.busy_until_s[row] == state.busy_until_s()
            assert set(state.started) <= set(state.prefills)
            assert self.index.expected(instance_id) == book.expected
        assert fleet.total_decoding == sum(b.decoding for b in books.values())
        assert fleet.total_decoding_context == sum(b.decoding_context for b in books.values())


class _Book:
    """What the attempts say is booked on one instance."""

    def __init__(self) -> None:
        self.prefills: set[str] = set()
        self.decodes: set[str] = set()
        self.handed_over: set[str] = set()
        self.serving: set[str] = set()
        self.expected: set[bytes] = set()
        self.serving_count = self.waiting_ns = self.booked_tokens = 0
        self.batch = self.context = self.decoding = self.decoding_context = 0


def _add_up(tracked: Tracked, attempt: Attempt, books: dict[str, _Book], stays: list[Stay]) -> None:
    work_id = attempt.work_id
    prefill, decoder = books.get(attempt.prefill), books[attempt.decoder]
    if attempt.stage is Stage.PREFILL:
        assert prefill is not None
        prefill.prefills.add(work_id)
        prefill.expected.update(attempt.expected_keys)
        if attempt.started_s is None:
            prefill.waiting_ns += attempt.prefill_ns
        if attempt.fetch_from is not None:
            books[attempt.fetch_from].serving.add(work_id)
            books[attempt.fetch_from].serving_count += 1
    elif attempt.decode is not None and prefill is not None:
        prefill.handed_over.add(work_id)
    decoder.booked_tokens += attempt.booked_tokens
    assert (attempt.stay is None) == (not attempt.answers)
    if attempt.stay is not None:
        stays.append(attempt.stay)
        decoder.decodes.add(work_id)
        decoder.batch += 1
        decoder.context += attempt.num_tokens
        if attempt.stage is Stage.DECODE:
            decoder.decoding += 1
            decoder.decoding_context += attempt.num_tokens
