"""The commands that a booked attempt begins with. Words only: what they say was decided before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.conductor.admission import UNLIMITED
from moonpool.conductor.placement import Placement
from moonpool.conductor.state import Attempt, InstanceState, Tracked
from moonpool.config import ConductorConfig
from moonpool.types import InstanceId, Slo
from moonpool.workers.messages import Command, Fetch, ReserveDecode, StartPrefill, Work

SECOND_LOOK = 1.1
"""The decode instance turns away what has been prefilled only when it is so far beyond the limit:
within it, the first look was as right as a projection can be, and the prefill is spent."""


def orders(
    tracked: Tracked,
    attempt: Attempt,
    placement: Placement,
    tokens: Sequence[int],
    instances: Mapping[InstanceId, InstanceState],
    config: ConductorConfig,
    tail: float,
    now: float,
) -> list[tuple[InstanceId, Command]]:
    """In the order in which they must be sent. `tail`: the longest tenth of an answer's gaps over
    its mean gap; the decode instance knows of mean steps only."""
    request = tracked.request
    work = Work(
        work_id=attempt.work_id,
        token_ids=tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        slo=_local_slo(tracked, config),
        tenant=request.tenant,
        use_cache=request.use_cache,
        timeout_s=max(request.deadline_s - now, 0.001),
        keys=request.keys,
        tolerance=(1.0 if config.admission == "baseline" else SECOND_LOOK) / tail,
    )
    commands: list[tuple[InstanceId, Command]] = []
    target = fetch = None
    if attempt.decode is not None:
        # The reservation goes first, so that the decode instance knows of the stream in time.
        patient = attempt.decode in tracked.failed_on
        commands.append((attempt.decode, ReserveDecode(work=work, patient=patient)))
        target = instances[attempt.decode].info.address
    if attempt.fetch_from is not None:
        source = instances[attempt.fetch_from].info
        num_blocks = placement.fetch_tokens // source.layout.block_tokens
        fetch = Fetch(source=source.address, num_blocks=num_blocks, load_s=placement.source_load_s)
    commands.append((attempt.prefill, StartPrefill(work=work, fetch=fetch, target=target)))
    return commands


def _local_slo(tracked: Tracked, config: ConductorConfig) -> Slo:
    """What the decode instance checks again."""
    slo, limit = tracked.request.slo, config.load_limit
    if tracked.generated or config.admission == "none":
        return UNLIMITED
    return slo if limit == 1.0 else Slo(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s * limit)
