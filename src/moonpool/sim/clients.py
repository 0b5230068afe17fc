"""Simulates clients, which start the calls of programs and retry a refused call.

A standalone request is sent once, at its time, as in a recorded trace. A call of a program is sent
when the calls before it have ended and its tools have run. A refused call is retried as real
clients retry it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moonpool.request_record import RequestRecord
from moonpool.sim.clock import Clock, Priority
from moonpool.sim.programs import ANSWERED, ProgramFigures
from moonpool.sim.workload import Arrival
from moonpool.trace.closed_loop import ClosedLoop, retry_after_s
from moonpool.types import RequestId


@dataclass(slots=True)
class _Sent:
    arrival: Arrival
    first_s: float  # the time of the first try
    num_tries: int = 1


class Clients:
    """Reads arrivals, and calls `send` with each arrival when it is due."""

    def __init__(
        self,
        clock: Clock,
        send: Callable[[RequestId, Arrival], None],
        block_tokens: int,
        most_programs: int | None = None,
    ) -> None:
        """`send` may end the request at once. At most `most_programs` programs run at a time; a
        further program begins when another has ended."""
        self.figures = ProgramFigures(block_tokens)
        self._clock, self._send = clock, send
        self._loop: ClosedLoop[Arrival] = ClosedLoop()
        self._arrivals: Iterator[Arrival] = iter(())
        self._sent: dict[str, _Sent] = {}  # calls of programs, by request id
        self._refused: dict[str, tuple[int, float | None]] = {}
        self._held: Arrival | None = None
        self._most_programs = most_programs
        self.num_sent = 0
        self.num_to_come = 0  # number of calls that wait for a call that was given up
        self.num_never_sent = 0  # calls that wait for a call that was given up
        self.has_more = True

    def start(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self._schedule_next()

    @property
    def in_pause(self) -> bool:
        """Whether a call that was read from the trace waits for its tools or for a retry."""
        return self.num_to_come > 0

    def _schedule_next(self) -> None:
        for arrival in self._arrivals:
            if not arrival.call:
                break
            if self._loop.drops(arrival):
                self.num_never_sent += 1
                continue
            self.figures.read(arrival, self._clock.now)
            wait_s = self._loop.add(arrival)
            if wait_s:
                self._later(wait_s, self._go_on, arrival)
            elif wait_s is not None:
                break
        else:
            self.has_more = False
            return
        at_s = max(arrival.arrived_s, self._clock.now)
        self._clock.at(at_s, Priority.ARRIVAL, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        most = self._most_programs
        # Only the program that arrives next has been read but not begun.
        if most is not None and arrival.call and self.figures.num_under_way > most:
            self._held = arrival
            return
        self._begin(arrival)
        self._schedule_next()

    def _begin(self, arrival: Arrival) -> None:
        request_id = self._next_id()
        if arrival.call:
            self.figures.begin(arrival, self._clock.now)
            self._sent[request_id] = _Sent(arrival, self._clock.now)
        self._send(request_id, arrival)

    def _next_id(self) -> RequestId:
        request_id = RequestId(str(self.num_sent))
        self.num_sent += 1
        return request_id

    def _go_on(self, arrival: Arrival) -> None:
        self.num_to_come -= 1
        self._begin(arrival)

    def _try_again(self, sent: _Sent) -> None:
        self.num_to_come -= 1
        sent.num_tries += 1
        request_id = self._next_id()
        self._sent[request_id] = sent
        self._send(request_id, sent.arrival)

    def note_refused(self, request_id: str, status: int, told_s: float | None) -> None:
        """Notes that a request was refused, and will end."""
        if request_id in self._sent:
            self._refused[request_id] = status, told_s

    def end(self, record: RequestRecord) -> bool:
        """Notes that a request has ended. Returns whether the client will not retry the request;
        its record then counts from the first try."""
        sent = self._sent.pop(record.request_id, None)
        if sent is None:
            return True
        now, call = self._clock.now, sent.arrival
        status, told_s = self._refused.pop(record.request_id, (0, None))
        wait_s = retry_after_s(status, sent.num_tries, told_s)
        if wait_s is not None:
            self.figures.num_retries += 1
            self._later(wait_s, self._try_again, sent)
            return False
        record.arrived_s = sent.first_s
        dropped = self._loop.num_dropped
        if record.outcome in ANSWERED:
            for following in self._loop.end(call.call):
                self._later(following.delay_s, self._go_on, following)
        else:
            self._loop.give_up(call.call)
        dropped = self._loop.num_dropped - dropped
        self.num_never_sent += dropped
        self.figures.end(call, record, call.keys, now, dropped)
        held, self._held = self._held, None
        if held is not None:
            self._arrive(held)
        return True

    def _later(self, wait_s: float, what: Callable[..., None], of: Arrival | _Sent) -> None:
        self.num_to_come += 1
        self._clock.after(wait_s, Priority.ARRIVAL, what, of)
