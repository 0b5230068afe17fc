"""Checks how each request of a run has ended: its record, its tokens, its refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.refusal import Refusal
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId
from tests.sim.promises import check_times
from tests.sim.truth import Truth
from tests.sim.workload import SHORT_DEADLINE_S

if TYPE_CHECKING:
    from tests.sim.world import World


def check_ending(world: World, request_id: RequestId, truth: Truth) -> None:
    record = world.ended[request_id].record
    delivers = world.answers.get(request_id, [])
    stopped = request_id in world.stopped
    finished = bool(delivers) and delivers[-1].finish is not None
    if stopped:
        assert record.outcome == "stop" and not finished and request_id not in world.refusals
        assert record.answer_tokens in world.stops
    else:
        assert (record.outcome == truth.finish.value) == finished
    assert record.finished_s is not None
    before = world.kept.get(request_id, 0)
    assert record.tokens_before == before
    generated = record.num_generated_tokens + record.num_surplus_tokens
    assert generated + before == sum(len(d.tokens) for d in delivers)
    assert finished or stopped or record.wasted_prefills_took_s == record.prefills_took_s
    world.seen[f"outcome {record.outcome}"] += 1
    if record.prefill_instance is not None:
        world.seen["inline prefill"] += record.prefill_instance.startswith("decode")
    if finished:
        if record.attempts == 1:
            check_times(record)
        if _is_undisturbed(world, truth):
            assert record.attempts == 1, f"{request_id} needed {record.attempts} attempts"
        assert before or (record.ttft_s is not None and record.ttft_s >= 0)
        assert request_id not in world.refusals
        return
    if stopped:
        world.seen["stop strings"] += 1
        return
    if record.outcome == "abort":
        assert request_id in world.cancelled and request_id not in world.refusals
        return
    refusal = world.refusals[request_id]
    world.promises.check_refusal(record, refusal.reason, truth.request.deadline_s)
    assert refusal.reason == record.outcome
    if refusal.status in (429, 503):
        assert refusal.retry_after_s is not None and 1 <= refusal.retry_after_s <= 120
    _check_refusal_was_early(world, truth, refusal, record)
    if request_id in world.kept:
        assert refusal.status != 429, "an answer under way is refused for its load"
        gone = refusal.reason in ("no_instance", "no_prefill_instance", "no_decode_instance")
        leaves = world.options.num_drains or world.options.num_role_switches
        assert not gone or leaves, "a new head waits for no instance"
    short = truth.request.deadline_s - truth.request.arrived_s <= SHORT_DEADLINE_S
    assert refusal.status != 504 or short, "it hung until its deadline"


def _check_refusal_was_early(
    world: World, truth: Truth, refusal: Refusal, record: RequestRecord
) -> None:
    """Asserts that without faults, a request that fits is refused only before its first attempt, or
    by the decode instance's own check of the SLO."""
    if _is_undisturbed(world, truth) and refusal.reason != "tbt_slo_late":
        assert record.attempts == 0, f"{record.request_id} refused late: {refusal}"


def _is_undisturbed(world: World, truth: Truth) -> bool:
    """Whether the request fits, in a run without faults and with true predictions."""
    opts, request = world.options, truth.request
    most_tokens = request.num_prompt_tokens + request.sampling.max_tokens
    promised = min(life.instance.num_blocks for life in world.lives.values())
    fits = world.layout.blocks_for(most_tokens) <= promised
    disturbed = opts.books_little or opts.cancel_rate or opts.short_deadline_rate
    # The Conductor counts an instance's free blocks in all arenas together.
    disturbed = disturbed or len(opts.arenas) > 1
    return opts.faultless and fits and not disturbed
