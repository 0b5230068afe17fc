"""Plans attempts: applies the placement and admission policies and writes the first commands.

Books no load: `RequestLifecycle` books what was planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

import msgspec
import numpy as np

from moonpool.conductor.admission.check import AdmissionCheck, goes_on
from moonpool.conductor.admission.policies import UNLIMITED, AdmissionFunction
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.output_predictor import OutputPredictor
from moonpool.conductor.placement.choice import (
    NO_ROOM,
    TIMED_REASONS,
    Placement,
    PlacementFunction,
    PlannedAttempt,
    Rejection,
    place,
)
from moonpool.conductor.placement.policies import PolicyError, RequestFootprint
from moonpool.conductor.state import Attempt, InstanceState, TrackedRequest
from moonpool.config.tables import ConductorConfig
from moonpool.kvcache.prefix_index import PrefixMatch
from moonpool.protocol.block_layout import BlockLayout, block_keys, root_key
from moonpool.protocol.messages import (
    AttemptSpec,
    Command,
    PrefixSource,
    ReserveDecode,
    StartPrefill,
)
from moonpool.types import InstanceId, Request, Slo

POLICY_ERROR = "policy_error"
"""The reason of a rejection because a policy from outside the package failed."""
RECHECK_TOLERANCE = 1.1
"""The decode instance rejects a prefilled request only if its load is above this multiple of the
limit. Below that, the check at arrival was as precise as a projection can be, and the prefill is
already spent.
"""


class Policies(NamedTuple):
    """Policies from outside the package, or None for the built-in one that the config names."""

    placement: PlacementFunction | None = None
    admission: AdmissionFunction | None = None


class AttemptPlanner:
    def __init__(
        self,
        config: ConductorConfig,
        policies: Policies,
        cluster_state: ClusterState,
        output_predictor: OutputPredictor,
        admission: AdmissionCheck,
    ) -> None:
        self.max_attempts = config.max_attempts  # most attempts of a request that get no new token
        self._config = config
        self._policies = policies
        self._cluster_state = cluster_state
        self._table, self._instances = cluster_state.instance_table, cluster_state.instances
        self._output_predictor = output_predictor
        self._admission = admission
        self._numbers = count(1)  # attempts are numbered because a client may reuse its request id

    @property
    def rejects_late(self) -> bool:
        """Whether a request is rejected that still waits for a decode batch when its TTFT SLO is
        missed."""
        return self._config.admission != "none"

    def plan(self, tracked: TrackedRequest, now: float) -> PlannedAttempt | Rejection:
        """Decides on the request's next attempt."""
        request, layout = tracked.request, self._cluster_state.layout
        if not self._instances or layout is None:
            return Rejection(503, "no_instance", "no instance is up", 5.0)
        tokens: Sequence[int] = request.token_ids
        if tracked.generated:
            tokens = (*tokens, *tracked.generated)
        name_blocks(tracked, tokens, layout)
        match = self._cluster_state.index.match(tracked.keys)
        footprint = self._footprint(tracked, len(tokens), layout)
        failed_on = [self._instances.get(name) for name in sorted(tracked.failed_on)]
        avoid = [state.row for state in failed_on if state is not None] + tracked.crowded
        lacking = self._cluster_state.lacking(request)
        if len(lacking) == len(self._instances):
            what = "with this adapter" if request.adapter else "that may serve this request"
            return Rejection(503, "no_instance", f"no instance {what} is up", 5.0)
        decision = self._decide(tracked, footprint, match, [*lacking, *avoid], now)
        if tracked.found_tokens is None:
            tracked.found_tokens = _found_tokens(footprint, decision, match)
        if isinstance(decision, Rejection) and avoid:
            decision = self._decide(tracked, footprint, match, lacking, now)
        if isinstance(decision, Rejection):
            return self._with_need(decision, footprint, match)
        self._output_predictor.predict(tracked, match.deepest)
        return PlannedAttempt(decision, footprint, tokens)

    def _with_need(
        self, rejection: Rejection, footprint: RequestFootprint, match: PrefixMatch
    ) -> Rejection:
        """Adds to the rejection what the request needs. A request that waits for room, or for the
        prompts before it, must be placed early enough for its prefill."""
        least_s = 0.0
        if rejection.reason in TIMED_REASONS:
            table, held = self._table, np.minimum(match.hits, footprint.usable_blocks)
            prefill_s = table.prefill_s(footprint.num_tokens, held * float(footprint.block_tokens))
            least_s = float(prefill_s[table.prefills].min(initial=np.inf))
        needs_room = footprint.decodes or rejection.reason == NO_ROOM
        room_tokens = footprint.expected_tokens if needs_room else 0
        return msgspec.structs.replace(rejection, prefill_s=least_s, room_tokens=room_tokens)

    def commands(
        self, tracked: TrackedRequest, attempt: Attempt, planned: PlannedAttempt, now: float
    ) -> list[tuple[InstanceId, Command]]:
        """The attempt's first commands, in the order in which they must be sent."""
        spec = _spec(tracked, attempt, planned, self._config, self._tolerance(planned), now)
        return _commands(tracked, attempt, planned.placement, spec, self._instances)

    def _tolerance(self, planned: PlannedAttempt) -> float:
        """Returns the mean step time above which the decode instance rejects the request, as a
        multiple of the TBT SLO. The instance itself knows mean step times only."""
        row, table = planned.placement.decoder_row, self._table
        tolerance = 1.0 if self._config.admission == "baseline" else RECHECK_TOLERANCE
        return tolerance / table.tbt_tail_of(row)

    def _footprint(
        self, tracked: TrackedRequest, num_tokens: int, layout: BlockLayout
    ) -> RequestFootprint:
        left = tracked.request.sampling.max_tokens - len(tracked.generated)
        expected = num_tokens
        if left > 1:
            expected += min(left, self._output_predictor.usual_tokens(tracked.request))
            # The answer may be shorter than the mean: a request that could just fit is not rejected
            # on every attempt.
            expected = min(expected, max(self._table.most_decode_tokens, num_tokens + 1))
        context, whole = expected, num_tokens + left
        if _stays(tracked.request) and whole < self._table.most_decode_tokens:
            context = whole  # the answer may otherwise fill the server's whole context
        return RequestFootprint(
            number=next(self._numbers),
            num_tokens=num_tokens,
            # In whole blocks, as an instance holds it.
            expected_tokens=layout.blocks_for(expected) * layout.block_tokens,
            decodes=left > 1,
            block_tokens=layout.block_tokens,
            token_bytes=self._cluster_state.token_bytes,
            answer_s=self._cluster_state.answer_s,
            answer_tokens=expected - num_tokens,
            tbt_s=min(tracked.request.slo.tbt_s, self._table.tbt_slo_s),
            competes=tracked.competes,
            context_tokens=context,
        )

    def _decide(
        self,
        tracked: TrackedRequest,
        footprint: RequestFootprint,
        match: PrefixMatch,
        avoid: Sequence[int],
        now: float,
    ) -> Placement | Rejection:
        """Applies both policies, without side effects on the bookings."""
        policy = self._policies.placement
        try:
            decision = place(footprint, self._table, match, self._config, now, avoid, policy)
            if isinstance(decision, Rejection):
                return decision
            return self._admission.check(tracked, footprint, decision, now)
        except PolicyError as error:
            return Rejection(500, POLICY_ERROR, str(error), 0.0)


def _stays(request: Request) -> bool:
    """Whether no other instance can go on with the request's answer."""
    return request.forwarded or bool(request.sampling.grammar)


def _found_tokens(
    footprint: RequestFootprint, decision: Placement | Rejection, match: PrefixMatch
) -> int:
    """Returns how many tokens of the prompt are cached at its instance, or the most at any instance
    if it was not placed."""
    if isinstance(decision, Placement):
        return decision.hit_tokens
    return min(match.deepest, footprint.usable_blocks) * footprint.block_tokens


def name_blocks(tracked: TrackedRequest, tokens: Sequence[int], layout: BlockLayout) -> None:
    """Names the blocks of the request's prompt and of its answer so far."""
    request = tracked.request
    if not request.use_cache or tracked.num_named_tokens == len(tokens):
        return
    tracked.num_named_tokens = len(tokens)
    if request.keys is not None:
        # keys of the prompt's blocks only: generated tokens have no keys
        tracked.keys = request.keys
    else:
        root = root_key(layout.fingerprint, request.tenant, request.adapter)
        tracked.keys = block_keys(tokens, layout.block_tokens, root)


def _spec(
    tracked: TrackedRequest,
    attempt: Attempt,
    planned: PlannedAttempt,
    config: ConductorConfig,
    tolerance: float,
    now: float,
) -> AttemptSpec:
    request = tracked.request
    return AttemptSpec(
        attempt_id=attempt.attempt_id,
        token_ids=planned.tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        slo=_local_slo(tracked, config, planned.placement.max_step_s is not None),
        tenant=request.tenant,
        use_cache=request.use_cache,
        timeout_s=max(request.deadline_s - now, 0.001),
        keys=request.keys,
        tolerance=tolerance,
        max_step_s=planned.placement.max_step_s,
        traceparent="" if request.trace is None else request.trace.traceparent,
        is_traced=request.trace is not None and request.trace.exported,
        adapter=request.adapter,
        priority=request.priority,
        share=tracked.share,
        cache_share=tracked.cache_share,
    )


def _local_slo(tracked: TrackedRequest, config: ConductorConfig, waits: bool) -> Slo:
    """The SLO that the decode instance checks again, or by which it tells requests apart that wait
    for different steps (`waits`). The decode instance knows no service classes."""
    slo, limit = tracked.request.slo.limits, config.load_limit
    if goes_on(tracked) or (config.admission == "none" and not waits):
        return UNLIMITED
    if limit == 1.0 and not slo.class_name:
        return slo
    return Slo(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s * limit)


def _commands(
    tracked: TrackedRequest,
    attempt: Attempt,
    placement: Placement,
    spec: AttemptSpec,
    instances: Mapping[InstanceId, InstanceState],
) -> list[tuple[InstanceId, Command]]:
    commands: list[tuple[InstanceId, Command]] = []
    target = fetch = None
    if attempt.decode is not None:
        # The reservation goes first, so that the decode instance can accept the KVCache stream.
        patient = attempt.decode in tracked.failed_on
        commands.append((attempt.decode, ReserveDecode(attempt=spec, patient=patient)))
        target = instances[attempt.decode].info.address
    if attempt.fetch_from is not None:
        source = instances[attempt.fetch_from].info
        num_blocks = placement.fetch_tokens // source.layout.block_tokens
        fetch = PrefixSource(
            source=source.address, num_blocks=num_blocks, load_s=placement.source_load_s
        )
    commands.append((attempt.prefill, StartPrefill(attempt=spec, fetch=fetch, target=target)))
    return commands
