"""Gathers figures of programs: how long each took, waited, and had blocks computed twice.

A program is an agent with its sub-agents. Its time runs from its first call's arrival to its last
call's end, tools included. A program loses the time in which one of its calls waits: between two
tries of a refused call, at the Conductor, in an instance's queue, and for room in a decode batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.distributions import Histogram, rounded
from moonpool.request_record import RequestRecord
from moonpool.trace.closed_loop import LoopCall

ANSWERED = ("stop", "length")


@dataclass(slots=True, eq=False)
class _Program:
    began_s: float
    ended_s: float
    lost_s: float = 0.0
    num_open: int = 0  # calls of the program that were read and have not ended
    num_calls: int = 0
    failed: bool = False
    input_tokens: int = 0
    recomputed_tokens: int = 0
    # keys of the blocks that were computed for this program
    keys: set[Any] = field(default_factory=set)
    sessions: list[str] = field(default_factory=list)

    def take(self, inner: _Program) -> None:
        """Adds the figures of `inner`, which was first noted as a separate program."""
        if inner.num_calls:
            self.began_s = min(self.began_s, inner.began_s) if self.num_calls else inner.began_s
        self.ended_s = max(self.ended_s, inner.ended_s)
        self.lost_s += inner.lost_s
        self.num_open += inner.num_open
        self.num_calls += inner.num_calls
        self.failed |= inner.failed
        self.input_tokens += inner.input_tokens
        self.recomputed_tokens += inner.recomputed_tokens
        self.keys |= inner.keys
        self.sessions += inner.sessions


class ProgramFigures:
    """Sums the figures of ended programs; memory holds only the programs under way."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens` is the number of tokens in a block that a call's keys name."""
        self.makespan_s, self.lost_s = Histogram(), Histogram()
        self.num_failed = self.num_calls = self.num_retries = 0
        self.input_tokens = self.recomputed_tokens = 0
        self._block_tokens = block_tokens
        self._programs: dict[str, _Program] = {}  # programs by the session of their first agent
        # maps a session to the session of its program's first agent
        self._roots: dict[str, str] = {}

    @property
    def num_under_way(self) -> int:
        """The number of programs that were read from the trace, begun or not, and have not
        ended."""
        return len(self._programs)

    def __len__(self) -> int:
        return int(self.makespan_s.count) + self.num_failed

    def read(self, call: LoopCall, now: float) -> None:
        """Notes that a call was read from the trace; it may start later."""
        program = self._program(call, now)
        program.num_open += 1

    def begin(self, call: LoopCall, now: float) -> None:
        """Notes that a call is sent for the first time."""
        program = self._program(call, now)
        if not program.num_calls:
            program.began_s = now
        program.num_calls += 1

    def end(
        self,
        call: LoopCall,
        record: RequestRecord,
        keys: Sequence[Any],
        now: float,
        num_dropped: int = 0,
    ) -> None:
        """Notes that a call has ended for good, and that `num_dropped` calls that waited for it
        will never be sent."""
        program = self._program(call, now)
        program.ended_s = now
        if record.outcome in ANSWERED:
            known = 0
            for key in keys:
                if key not in program.keys:
                    break
                known += 1
            program.input_tokens += record.num_prompt_tokens
            twice = known * self._block_tokens - record.cached_tokens
            program.recomputed_tokens += max(twice, 0)
            program.keys.update(keys)
            program.lost_s += lost_s(record)
        else:
            program.failed = True
        program.num_open -= 1 + num_dropped
        if program.num_open > 0:
            return
        root = self._root(call)
        del self._programs[root]
        for name in program.sessions:
            del self._roots[name]
        self.num_calls += program.num_calls
        if program.failed:
            self.num_failed += 1
            return
        self.makespan_s.add(max(program.ended_s - program.began_s, 0.0))
        self.lost_s.add(max(program.lost_s, 0.0))
        self.input_tokens += program.input_tokens
        self.recomputed_tokens += program.recomputed_tokens

    def _root(self, call: LoopCall) -> str:
        session = call.session or call.call
        known = self._roots.get(session)
        if known is None:
            known = self._roots.get(call.parent, call.parent) if call.parent else session
        return known

    def _program(self, call: LoopCall, now: float) -> _Program:
        root = self._root(call)
        program = self._programs.get(root)
        if program is None:
            program = self._programs[root] = _Program(now, now)
        session = call.session or call.call
        if session not in self._roots:
            self._roots[session] = root
            program.sessions.append(session)
            # Sub-agents were read before this agent, which itself turns out to have a parent.
            inner = self._programs.pop(session, None) if session != root else None
            if inner is not None:
                program.take(inner)
                self._roots |= dict.fromkeys(inner.sessions, root)
        return program

    def _with_failed(self) -> dict[str, float]:
        """Returns P50 and P90 over all programs. A program that was given up counts as if it took
        as long as the longest other program."""
        longest_s, found = self.makespan_s.largest, {}
        total = len(self)
        for name, share in (("p50", 0.5), ("p90", 0.9)):
            of_others = share * total / max(self.makespan_s.count, 1)
            found[name] = rounded(
                longest_s if of_others > 1.0 else self.makespan_s.quantile(of_others)
            )
        return found

    def summary(self) -> dict[str, Any]:
        """Returns the summary for `simulate --json` and `replay --json`."""
        return {
            "count": len(self),
            "failed": self.num_failed,
            "unfinished": len(self._programs),
            "calls": self.num_calls,
            "retries": self.num_retries,
            "makespan_s": self.makespan_s.summary(),
            "makespan_with_failed_s": self._with_failed(),
            "lost_s": self.lost_s.summary(),
            "input_tokens": self.input_tokens,
            "recomputed_tokens": self.recomputed_tokens,
        }


def lost_s(record: RequestRecord) -> float:
    """Returns the time in which the call of `record` waited."""
    stages = record.stages_s()
    return sum(stages.get(name, 0.0) for name in ("placement", "queue_and_fetch", "handover"))
