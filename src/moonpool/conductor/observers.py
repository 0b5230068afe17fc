"""Observers of the cluster: parts that learn from its events, count them or follow them. The
Conductor has one list of observers and tells them each event in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moonpool.conductor.actions import ConductorAction
from moonpool.conductor.placement.choice import PlannedAttempt
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.protocol.messages import AttemptId, PrefillStarted, PrefixTakenOver, StepTokens
from moonpool.types import BlockKey


class ClusterObserver:
    """The events of a cluster, in the order of a request's life. An observer overrides the events
    that it needs. Events that an observer does not override cost nothing."""

    def arrived(self, tracked: TrackedRequest, now: float) -> None:
        """Called when a request has arrived. No decision about the request is made yet."""

    def considered(self, tracked: TrackedRequest, now: float) -> None:
        """Called when the request was planned for the first time. `tracked.found_tokens` of its
        prompt are cached on the instance for which it was planned. If it was rejected, they are the
        most that are cached on any one instance."""

    def accepted(self, tracked: TrackedRequest, now: float) -> None:
        """Called when a new request was not refused: it was placed, or it waits."""

    def placed(self, tracked: TrackedRequest, planned: PlannedAttempt, now: float) -> None:
        """Called when an attempt is booked; it is now `tracked.attempt`."""

    def prefill_started(self, tracked: TrackedRequest, report: PrefillStarted, now: float) -> None:
        """Called when the first chunk of a prompt begins to be computed."""

    def prefill_done(self, tracked: TrackedRequest, now: float) -> None:
        """Called when a prompt is computed. The prefill of the prompt is still booked."""

    def decode_started(self, tracked: TrackedRequest, now: float) -> None:
        """Called when an attempt has joined the batch of its decode instance."""

    def step(
        self,
        state: InstanceState,
        report: StepTokens,
        attempts: Mapping[AttemptId, TrackedRequest],
        now: float,
    ) -> None:
        """Called when steps of an instance have ended. The tokens of these steps are not added yet.
        `attempts`: all attempts that are under way."""

    def tokens(self, tracked: TrackedRequest, now: float) -> None:
        """Called when tokens of a step were added to an answer that decodes."""

    def first_token(self, tracked: TrackedRequest, now: float) -> None:
        """Called when a request has its first token. Not called for forwarded requests, whose
        tokens are estimates."""

    def ended(self, tracked: TrackedRequest, is_answered: bool, now: float) -> None:
        """Called when a request has ended, as a complete answer or not. The request's attempt is
        still booked."""

    def answered(self, tracked: TrackedRequest, decoder: InstanceState | None, now: float) -> None:
        """Called when a request has ended as a complete answer, after `ended`, and not for
        forwarded requests. `decoder`: the instance that produced the last tokens, if it is still in
        the cluster."""

    def blocks_demoted(self, keys: Iterable[BlockKey], now: float) -> None:
        """Called when blocks have moved from the DRAM of an instance to its SSD."""

    def prefix_taken(self, report: PrefixTakenOver, now: float) -> Sequence[ConductorAction]:
        """Called when an instance has copied a prefix from another one, as the Conductor commanded.
        Returns the actions to perform."""
        return ()

    def tick(self, now: float) -> Iterable[ConductorAction]:
        """Called when time has passed. Returns the actions to perform."""
        return ()

    def validate(self) -> None:
        """Asserts that the observer's state is consistent."""


class Observers:
    """The Conductor's list of observers. For each event it keeps the methods of the observers that
    override the event."""

    def __init__(self, observers: Sequence[ClusterObserver]) -> None:
        told = ClusterObserver
        self.arrived: _Notes = _overrides(observers, told.arrived)
        self.considered: _Notes = _overrides(observers, told.considered)
        self.accepted: _Notes = _overrides(observers, told.accepted)
        self.placed: list[Callable[[TrackedRequest, PlannedAttempt, float], None]] = _overrides(
            observers, told.placed
        )
        self.prefill_started: list[Callable[[TrackedRequest, PrefillStarted, float], None]] = (
            _overrides(observers, told.prefill_started)
        )
        self.prefill_done: _Notes = _overrides(observers, told.prefill_done)
        self.decode_started: _Notes = _overrides(observers, told.decode_started)
        self.step: list[
            Callable[[InstanceState, StepTokens, Mapping[AttemptId, TrackedRequest], float], None]
        ] = _overrides(observers, told.step)
        self.tokens: _Notes = _overrides(observers, told.tokens)
        self.first_token: _Notes = _overrides(observers, told.first_token)
        self.ended: list[Callable[[TrackedRequest, bool, float], None]] = _overrides(
            observers, told.ended
        )
        self.answered: list[Callable[[TrackedRequest, InstanceState | None, float], None]] = (
            _overrides(observers, told.answered)
        )
        self.blocks_demoted: list[Callable[[Iterable[BlockKey], float], None]] = _overrides(
            observers, told.blocks_demoted
        )
        self.prefix_taken: list[Callable[[PrefixTakenOver, float], Sequence[ConductorAction]]] = (
            _overrides(observers, told.prefix_taken)
        )
        self.tick: list[Callable[[float], Iterable[ConductorAction]]] = _overrides(
            observers, told.tick
        )
        self.validate: list[Callable[[], None]] = _overrides(observers, told.validate)


_Notes = list[Callable[[TrackedRequest, float], None]]


def _overrides(observers: Sequence[ClusterObserver], event: Callable[..., Any]) -> list[Any]:
    """Returns the bound methods of the observers that override an event, in the order of the
    list."""
    name = event.__name__
    return [getattr(each, name) for each in observers if getattr(type(each), name) is not event]
