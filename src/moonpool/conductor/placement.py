"""Where a request is prefilled and decoded: Mooncake's Algorithm 1, without side effects.

Mended with respect to the paper (v3 page 10, FAST'25 page 8), for these reasons:

* `best_hit / hit` is undefined at hit = 0: 0/0 counts as 1 (nothing to gain), x/0 as infinite.
* v3 scores with `<` and migrates with `>`, so at equality the score assumes a transfer that never
  starts. Here the score and the transfer are one decision: what was scored is what is done.
* The paper fetches whenever the ratio exceeds the threshold. Here the threshold only permits a
  fetch; it is chosen when the estimate says it is faster than computing the gap (the paper's
  prose says so too, though with the comparison turned round).
* TTFT is not the plain sum: a fetch runs while the request waits in the queue, so the longer of
  the two counts, then the prefill.
* The first instance won all ties, so an idle cluster sent everything to it. Ties go to the
  instance that has been idle longest.
* A holder may be any instance, decode ones included: the last turn's answer lies there.
* `SelectDecodingInstance` is unspecified: here the smallest predicted TBT among instances with
  room, and among near equals the one that already holds most of the prompt (least to transfer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.config import ConductorConfig
from moonpool.cost.model import CostModel
from moonpool.types import InstanceId, Role, Slo

TBT_TIE = 1.05
"""Predicted TBTs within 5 % are equal: below the estimate's own error."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance as placement sees it, for one request."""

    instance_id: InstanceId
    role: Role
    cost: CostModel
    host_id: str
    hit_tokens: int  # of this prompt, held or being computed there
    source_tokens: int  # of this prompt, held there now: what others could fetch
    queue_s: float  # until a new prefill could start
    num_fetches_served: int
    decode_batch: int
    decode_context_tokens: int
    room_tokens: int
    next_exit_s: float  # until a decode is expected to end
    last_placed_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What placement needs to know of a request."""

    num_tokens: int
    expected_tokens: int  # room to book at the decode instance: prompt and answer
    decodes: bool  # False if the first token is also the last
    token_bytes: int
    slo: Slo


@dataclass(frozen=True, slots=True)
class Placement:
    """Both halves, chosen together, before any work."""

    prefill: InstanceId
    decode: (
        InstanceId | None
    )  # None: the prefill instance goes on (mixed), or nothing is left to do
    fetch_from: InstanceId | None
    fetch_tokens: int
    hit_tokens: int  # usable at the prefill instance, the fetch included
    prefill_s: float
    ttft_s: float
    tbt_s: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejection:
    status: int
    reason: str
    message: str
    retry_after_s: float


def place(
    demand: Demand, views: Sequence[InstanceView], config: ConductorConfig
) -> Placement | Rejection:
    """Chooses prefill and decode instance by predicted TTFT and TBT. Never both refuses and
    books."""
    prefills = [v for v in views if v.role.prefills]
    if not prefills:
        return Rejection(503, "no_prefill_instance", "no prefill instance is up", 5.0)
    scored = [_score(demand, view, views, config) for view in prefills]
    scored.sort(key=lambda s: (s.ttft_s, s.view.queue_s, s.view.last_placed_s))
    best, decode = scored[0], _select_decode(demand, scored[0].view, views)
    for score in scored[1:]:
        if decode is not None:
            break
        # A mixed instance without room must not stand for all: the next best may have some.
        best, decode = score, _select_decode(demand, score.view, views)
    if decode is None:
        return _no_decode(demand, views)
    tbt_s = _tbt_s(demand, decode) if demand.decodes else 0.0
    if config.admission != "none":
        if best.ttft_s > demand.slo.ttft_s:
            return _late(demand, best, scored)
        if tbt_s > demand.slo.tbt_s:
            return _slow(demand, tbt_s, views)
    hands_over = demand.decodes and decode.instance_id != best.view.instance_id
    return Placement(
        prefill=best.view.instance_id,
        decode=decode.instance_id if hands_over else None,
        fetch_from=best.fetch_from,
        fetch_tokens=best.hit_tokens if best.fetch_from else 0,
        hit_tokens=best.hit_tokens,
        prefill_s=best.prefill_s,
        ttft_s=best.ttft_s,
        tbt_s=tbt_s,
        reasons=tuple(s.text for s in scored),
    )


@dataclass(frozen=True, slots=True)
class _Score:
    view: InstanceView
    ttft_s: float
    prefill_s: float
    hit_tokens: int
    fetch_from: InstanceId | None
    text: str


def _score(
    demand: Demand, view: InstanceView, views: Sequence[InstanceView], config: ConductorConfig
) -> _Score:
    """The instance's best way to the first token: compute the gap, or fetch it."""
    local_s = view.cost.prefill_s(demand.num_tokens, view.hit_tokens)
    ttft_s, prefill_s = view.queue_s + local_s, local_s
    hit, fetch_from, how = view.hit_tokens, None, "computes the rest"
    for source in views:
        if source.instance_id == view.instance_id:
            continue
        if not _worth_asking(source.source_tokens, view.hit_tokens, config):
            continue
        num_bytes = (source.source_tokens - view.hit_tokens) * demand.token_bytes
        same_host = bool(source.host_id) and source.host_id == view.host_id
        sharing = source.num_fetches_served + 1
        transfer_s = view.cost.transfer_s(num_bytes, same_host, sharing)
        fetched_s = view.cost.prefill_s(demand.num_tokens, source.source_tokens)
        with_fetch_s = max(view.queue_s, transfer_s) + fetched_s
        if with_fetch_s < ttft_s:
            ttft_s, prefill_s, hit = with_fetch_s, fetched_s, source.source_tokens
            fetch_from, how = source.instance_id, f"fetches from {source.instance_id}"
    text = (
        f"{view.instance_id}: queue {view.queue_s:.3f} s, hit {view.hit_tokens} tokens, {how},"
        f" prefill {prefill_s:.3f} s, TTFT {ttft_s:.3f} s"
    )
    return _Score(view, ttft_s, prefill_s, hit, fetch_from, text)


def _worth_asking(source_tokens: int, hit_tokens: int, config: ConductorConfig) -> bool:
    if source_tokens <= hit_tokens:
        return False
    if hit_tokens == 0:
        return True
    return source_tokens / hit_tokens > config.kvcache_balancing_threshold


def _tbt_s(demand: Demand, view: InstanceView) -> float:
    contexts = view.decode_context_tokens + demand.expected_tokens
    return view.cost.decode_step_s(view.decode_batch + 1, contexts)


def _select_decode(
    demand: Demand, prefill: InstanceView, views: Sequence[InstanceView]
) -> InstanceView | None:
    if not demand.decodes:
        return prefill
    if prefill.role is Role.MIXED:
        return prefill if prefill.room_tokens >= demand.expected_tokens else None
    able = [v for v in views if v.role.decodes and v.room_tokens >= demand.expected_tokens]
    if not able:
        return None
    fastest_s = min(_tbt_s(demand, v) for v in able)
    near = [v for v in able if _tbt_s(demand, v) <= fastest_s * TBT_TIE]
    return min(near, key=lambda v: (-v.hit_tokens, _tbt_s(demand, v), v.last_placed_s))


def _no_decode(demand: Demand, views: Sequence[InstanceView]) -> Rejection:
    decodes = [v for v in views if v.role.decodes]
    if not decodes:
        return Rejection(503, "no_decode_instance", "no decode instance is up", 5.0)
    text = f"no decode instance has room for {demand.expected_tokens} more tokens of KVCache"
    busy = [v.next_exit_s for v in decodes if v.decode_batch]
    if not busy:
        return Rejection(503, "no_decode_capacity", f"{text}, not even an idle one", 5.0)
    wait_s = min(busy)
    text += f"; the next answer should end in {wait_s:.0f} s"
    return Rejection(503, "no_decode_capacity", text, wait_s)


def _late(demand: Demand, best: _Score, scored: Sequence[_Score]) -> Rejection:
    idle_s = best.ttft_s - best.view.queue_s
    if idle_s > demand.slo.ttft_s:
        text = (
            f"predicted TTFT {best.ttft_s:.2f} s exceeds the SLO of {demand.slo.ttft_s:g} s even on"
            f" an idle instance: shorten the prompt or raise the SLO"
        )
    else:
        text = f"predicted TTFT {best.ttft_s:.2f} s exceeds the SLO of {demand.slo.ttft_s:g} s"
    wait_s = min(s.ttft_s for s in scored) - demand.slo.ttft_s
    return Rejection(429, "ttft_slo", text, wait_s)


def _slow(demand: Demand, tbt_s: float, views: Sequence[InstanceView]) -> Rejection:
    text = f"predicted time between tokens {tbt_s:.3f} s exceeds the SLO of {demand.slo.tbt_s:g} s"
    decodes = [v for v in views if v.role.decodes]
    idle_s = min(v.cost.decode_step_s(1, demand.expected_tokens) for v in decodes)
    if idle_s > demand.slo.tbt_s:
        text += " even on an idle instance: raise the SLO"
    wait_s = min((v.next_exit_s for v in decodes if v.decode_batch), default=0.0)
    return Rejection(429, "tbt_slo", text, wait_s)
