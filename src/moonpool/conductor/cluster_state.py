"""The load that the Conductor has booked on instances for each attempt.

A booked attempt counts in the sums of the instance table, in the blocks that the index expects and
in the forecast; `validate` compares them. This module chooses no instance, sends no command and
answers no client.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.conductor.forecast.beginners import Beginners
from moonpool.conductor.forecast.decode_forecast import DecodeInterval, Forecast
from moonpool.conductor.instance_table import InstanceTable, to_ns
from moonpool.conductor.placement.choice import PlannedAttempt
from moonpool.conductor.state import Attempt, AttemptPhase, InstanceState, TrackedRequest
from moonpool.kvcache.prefix_index import PrefixIndex
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import AttemptId, InstanceInfo
from moonpool.types import InstanceId, Request, Role

FIRST_ANSWER_S = 10.0
"""Assumed duration of an answer until one has ended."""
VLLM = "vllm"
"""The layout that vLLM instances report for the inside of their blocks."""


class ClusterState:
    def __init__(
        self,
        forecast: Forecast,
        tbt_slo_s: float = float("inf"),
        sizes_chunks: bool = True,
        incarnation: str = "",
    ) -> None:
        """`tbt_slo_s`, `sizes_chunks`: see `InstanceTable`. `incarnation`: part of all attempt ids,
        as in `Conductor`."""
        # the block layout of all instances, known as soon as one has joined
        self.layout: BlockLayout | None = None
        self.token_bytes = 0  # bytes of KVCache of one token; 0 until an instance has joined
        self._incarnation = f"{incarnation}." if incarnation else ""
        self.instance_table = InstanceTable(tbt_slo_s, sizes_chunks)
        self.index = PrefixIndex()
        self.forecast = forecast
        self.instances: dict[InstanceId, InstanceState] = {}
        self.beginners = Beginners()  # instances that learn from their first prefills

    @property
    def answer_s(self) -> float:
        """Mean duration of an answer's decode."""
        mean_s = self.forecast.mean_s
        return FIRST_ANSWER_S if mean_s is None else mean_s

    def lacking(self, request: Request) -> list[int]:
        """The rows of instances that may not serve the request, or that lack its adapter: vLLM
        servers may have different ones."""
        adapter, states = request.adapter, self.instances.values()
        if not adapter and request.within is None:
            return []
        allowed = self.instances if request.within is None else set(request.within)
        return [
            state.row
            for state in states
            if state.info.instance_id not in allowed
            or (adapter and adapter not in state.info.adapters)
        ]

    def is_bound(self, tracked: TrackedRequest) -> bool:
        """Whether no other attempt can take the place of the request's attempt: its answer has
        begun and cannot continue elsewhere, or the request stays where it is."""
        request = tracked.request
        is_vllm = self.layout is not None and self.layout.inner == VLLM
        is_begun, has_grammar = bool(tracked.generated), bool(request.sampling.grammar)
        return request.pinned or (is_begun and (request.forwarded or (is_vllm and has_grammar)))

    def join(self, info: InstanceInfo) -> InstanceState:
        self.layout, self.token_bytes = info.layout, info.layout.token_bytes
        row = self.index.add_instance(info.instance_id, info.incarnation, info.num_blocks)
        self.instance_table.join(row, info)
        state = InstanceState(info, row, info.role)
        self.instances[info.instance_id] = state
        return state

    def leave(self, instance_id: InstanceId) -> InstanceState | None:
        """Removes the instance and all sums booked on it. The attempts on that instance keep their
        own fields until they are placed again."""
        state = self.instances.pop(instance_id, None)
        if state is None:
            return None
        self.beginners.wake(state)
        for tracked in state.prefills.values():
            assert tracked.attempt is not None
            self.index.unexpect(instance_id, tracked.attempt.expected_keys)
        self.index.remove_instance(instance_id)
        self.instance_table.leave(state.row)
        for attempt in state.serving.values():
            # without a source, the fetch fails, and the instance computes the prefix instead
            attempt.fetch_from = None
        return state

    def book(self, tracked: TrackedRequest, planned: PlannedAttempt, now: float) -> Attempt:
        """Books the whole attempt on all its instances, and returns it."""
        attempt = self._attempt(tracked, planned)
        attempt_id, table = attempt.attempt_id, self.instance_table
        prefill, decoder = self.instances[attempt.prefill], self.instances[attempt.decoder]
        prefill.prefills[attempt_id] = tracked
        table.waiting_ns[prefill.row] += attempt.prefill_ns
        if attempt.in_chunks:
            table.book_chunked(prefill.row)
        self.index.expect(attempt.prefill, attempt.expected_keys)
        table.last_placed_s[prefill.row] = table.last_placed_s[decoder.row] = now
        if attempt.booked_tokens:
            table.room_tokens[decoder.row] -= attempt.booked_tokens
        if attempt.decodes:
            decoder.decodes[attempt_id] = tracked
            table.book_decode(decoder.row, attempt.num_tokens)
        if attempt.fetch_from is not None:
            source = self.instances[attempt.fetch_from]
            source.serving[attempt_id] = attempt
            table.num_serving[source.row] += 1
        return attempt

    def _attempt(self, tracked: TrackedRequest, planned: PlannedAttempt) -> Attempt:
        placement, footprint = planned.placement, planned.footprint
        prefill = self.instances[placement.prefill]
        # A prefill instance's own queue waits for room. On a mixed instance, a prefill without a
        # decode must not take the room that was booked for others.
        mixed = prefill.role is Role.MIXED
        caches = prefill.info.caches_prefixes
        return Attempt(
            attempt_id=AttemptId(
                f"{tracked.request.request_id}/{self._incarnation}{footprint.number}"
            ),
            prefill=placement.prefill,
            decode=placement.decode,
            fetch_from=placement.fetch_from,
            prefill_ns=to_ns(placement.prefill_s),
            num_tokens=footprint.num_tokens,
            booked_tokens=footprint.expected_tokens if footprint.decodes or mixed else 0,
            decodes=footprint.decodes,
            expected_keys=tracked.keys[placement.held_blocks :] if caches else (),
            tbt_s=placement.tbt_s,
            begins_at=len(tracked.generated),
            waits=placement.max_step_s is not None,
            in_chunks=placement.in_chunks,
        )

    def start_prefill(self, attempt: Attempt, now: float) -> None:
        state = self.instances[attempt.prefill]
        if attempt.attempt_id not in state.prefills or attempt.started_s is not None:
            return
        attempt.started_s = now
        state.started[attempt.attempt_id] = attempt
        self.beginners.wake(state)
        self.instance_table.waiting_ns[state.row] -= attempt.prefill_ns
        self.instance_table.busy_until_s[state.row] = state.busy_until_s()

    def rescale_prefills(self, state: InstanceState, factor: float) -> None:
        """Multiplies the predicted times of the booked prefills, which are the queue of later
        requests."""
        waiting_ns = 0
        for tracked in state.prefills.values():
            attempt = tracked.attempt
            assert attempt is not None
            attempt.prefill_ns = round(attempt.prefill_ns * factor)
            waiting_ns += attempt.prefill_ns if attempt.started_s is None else 0
        self.instance_table.waiting_ns[state.row] = waiting_ns
        self.instance_table.busy_until_s[state.row] = state.busy_until_s()

    def end_prefill(self, tracked: TrackedRequest, attempt: Attempt, now: float) -> None:
        """Removes the booking of the prefill, if there is still one."""
        state = self.instances.get(attempt.prefill)
        if state is not None:
            if state.prefills.pop(attempt.attempt_id, None) is None:
                return
            self._end_prefill_at(state, attempt, now)
            if attempt.in_chunks:
                self.instance_table.book_chunked(state.row, -1)
            self.index.unexpect(attempt.prefill, attempt.expected_keys)
            if attempt.decode is not None:
                state.handed_over[attempt.attempt_id] = tracked
        if attempt.fetch_from is not None:
            source = self.instances[attempt.fetch_from]
            del source.serving[attempt.attempt_id]
            self.instance_table.num_serving[source.row] -= 1
            attempt.fetch_from = None

    def _end_prefill_at(self, state: InstanceState, attempt: Attempt, now: float) -> None:
        if attempt.started_s is None:
            self.instance_table.waiting_ns[state.row] -= attempt.prefill_ns
            return
        if next(iter(state.started)) == attempt.attempt_id:
            state.freed_s = now
        del state.started[attempt.attempt_id]
        self.beginners.wake(state)
        self.instance_table.busy_until_s[state.row] = state.busy_until_s()

    def begin_decoding(self, attempt: Attempt, now: float) -> None:
        attempt.phase = AttemptPhase.DECODE
        attempt.decoding_since_s = now
        if attempt.decodes:
            self.instance_table.begin_decoding(
                self.instances[attempt.decoder].row, attempt.num_tokens
            )

    def add_tokens(self, attempt: Attempt, num_tokens: int) -> int:
        """Lengthens the attempt's context; returns the KVCache tokens needed beyond its booking.
        Once per step, the caller passes the sums of `num_tokens` and of these KVCache tokens to
        `InstanceTable.grow`."""
        attempt.num_tokens += num_tokens
        lacking = attempt.num_tokens + 1 - attempt.booked_tokens
        if lacking <= 0:
            return 0
        # In whole blocks, as the instance holds it: an answer may be longer than predicted.
        extra = self.instances[attempt.decoder].info.layout.blocks_for(lacking)
        extra *= self.instances[attempt.decoder].info.layout.block_tokens
        attempt.booked_tokens += extra
        return extra

    def unbook(self, tracked: TrackedRequest, attempt: Attempt, now: float) -> None:
        """Removes all that is still booked for the attempt."""
        self.end_prefill(tracked, attempt, now)
        if attempt.interval is not None:
            self.forecast.leave(attempt.interval, now)
            attempt.interval = None
        prefill = self.instances.get(attempt.prefill)
        if prefill is not None:
            prefill.handed_over.pop(attempt.attempt_id, None)
        state = self.instances.get(attempt.decoder)
        if state is None:
            return
        if attempt.booked_tokens:
            self.instance_table.room_tokens[state.row] += attempt.booked_tokens
        if state.decodes.pop(attempt.attempt_id, None) is not None:
            self.instance_table.book_decode(state.row, attempt.num_tokens, -1)
            if attempt.phase is AttemptPhase.DECODE:
                self.instance_table.end_decoding(state.row, attempt.num_tokens)

    def validate(self, requests: Iterable[TrackedRequest]) -> None:
        """Asserts that every sum equals the sum over the attempts."""
        self.index.validate()
        loads: dict[str, _ReservedLoad] = {name: _ReservedLoad() for name in self.instances}
        intervals: list[DecodeInterval] = []
        for tracked in requests:
            attempt = tracked.attempt
            assert attempt is not None
            _add_up(tracked, attempt, loads, intervals)
        self.forecast.validate(intervals)
        table = self.instance_table
        for instance_id, state in self.instances.items():
            row, load = state.row, loads[instance_id]
            assert table.ids[row] == instance_id
            role, serves = state.role, state.drain is None
            assert table.prefills[row] == (serves and role.prefills)
            assert table.decodes[row] == (serves and role.decodes)
            assert load.prefills == set(state.prefills)
            assert load.decodes == set(state.decodes)
            # other ids are from before the instance joined again
            assert load.handed_over >= set(state.handed_over)
            assert load.serving == set(state.serving)
            assert load.serving_count == table.num_serving[row]
            assert load.waiting_ns == table.waiting_ns[row]
            assert load.chunked == table.num_chunked[row]
            booked_tokens = load.booked_tokens + sum(state.handover_tokens.values())
            assert booked_tokens == table.capacity_tokens[row] - table.room_tokens[row]
            assert (load.batch, load.context) == (
                table.booked_batch[row],
                table.booked_context[row],
            )
            assert (load.decoding, load.decoding_context) == (
                table.decoding_batch[row],
                table.decoding_context[row],
            )
            assert table.busy_until_s[row] == state.busy_until_s()
            assert set(state.started) <= set(state.prefills)
            assert self.index.expected(instance_id) == load.expected
        assert table.total_decoding == sum(b.decoding for b in loads.values())
        assert table.total_decoding_context == sum(b.decoding_context for b in loads.values())


class _ReservedLoad:
    """The bookings of all attempts on one instance."""

    def __init__(self) -> None:
        self.prefills: set[str] = set()
        self.decodes: set[str] = set()
        self.handed_over: set[str] = set()
        self.serving: set[str] = set()
        self.expected: set[bytes] = set()
        self.serving_count = self.waiting_ns = self.booked_tokens = self.chunked = 0
        self.batch = self.context = self.decoding = self.decoding_context = 0


def _add_up(
    tracked: TrackedRequest,
    attempt: Attempt,
    loads: dict[str, _ReservedLoad],
    intervals: list[DecodeInterval],
) -> None:
    attempt_id = attempt.attempt_id
    prefill, decoder = loads.get(attempt.prefill), loads[attempt.decoder]
    if attempt.phase is AttemptPhase.PREFILL:
        assert prefill is not None
        prefill.prefills.add(attempt_id)
        prefill.chunked += attempt.in_chunks
        prefill.expected.update(attempt.expected_keys)
        if attempt.started_s is None:
            prefill.waiting_ns += attempt.prefill_ns
        if attempt.fetch_from is not None:
            loads[attempt.fetch_from].serving.add(attempt_id)
            loads[attempt.fetch_from].serving_count += 1
    elif attempt.decode is not None and prefill is not None:
        prefill.handed_over.add(attempt_id)
    decoder.booked_tokens += attempt.booked_tokens
    assert (attempt.interval is None) == (not attempt.decodes)
    if attempt.interval is not None:
        intervals.append(attempt.interval)
        decoder.decodes.add(attempt_id)
        decoder.batch += 1
        decoder.context += attempt.num_tokens
        if attempt.phase is AttemptPhase.DECODE:
            decoder.decoding += 1
            decoder.decoding_context += attempt.num_tokens
