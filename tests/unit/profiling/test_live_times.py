"""Tests how a client of a live cluster derives the times of steps and prefills, and its probes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from moonpool.cost.fitted import FittedCost
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId
from moonpool_lab.profiling.live_profile import (
    DECODE_TOKENS,
    LiveProfiler,
    ProfileError,
    TimedPart,
    common_step_s,
    prefill_time_s,
)
from moonpool_lab.replay.stream import NO_SLO


def timed(instants_s: list[float]) -> TimedPart:
    return TimedPart(RequestRecord(RequestId("probe"), 4, NO_SLO, 0.0), {}, tuple(instants_s))


def test_steps_are_timed_while_all_answers_run() -> None:
    early = timed([0.1 * n for n in range(40)])
    late = timed([0.5 + 0.1 * n for n in range(40)])
    assert common_step_s([early, late]) == pytest.approx(0.1)


def test_answers_that_overlap_too_shortly_have_no_step() -> None:
    early = timed([0.1 * n for n in range(DECODE_TOKENS)])
    late = timed([2.0 + 0.1 * n for n in range(DECODE_TOKENS)])
    assert common_step_s([early, late]) is None


def test_tokens_that_come_in_one_bunch_have_no_step() -> None:
    """Tokens may come together, as from a delayed head. The code must not divide by a step time of
    0."""
    bunch = timed([1.0] * 40)
    assert common_step_s([bunch, bunch]) is None


def test_a_prefill_whose_reports_come_together_has_its_time() -> None:
    prompt = {"queue_and_fetch": 0.002, "prefill": 0.040}
    together = {"queue_and_fetch": 0.0418, "prefill": 0.0002}
    assert prefill_time_s(prompt, 0.002) == pytest.approx(0.040)
    assert prefill_time_s(together, 0.002) == pytest.approx(0.040)


COST = FittedCost(prefill=(1e-6, 1e-7, 0.0, 0.0), decode=(0.008, 0.002, 1e-7))
POOL = {"block_tokens": 16, "block_bytes": 16_384, "blocks": 4096}


class FakeCluster(LiveProfiler):
    """One instance whose model has a short context, or no model."""

    def __init__(self, context: int, model: dict[str, Any] | None) -> None:
        super().__init__("http://127.0.0.1:1", 2560)
        self.context = context
        self.model = model
        self.longest = 0

    async def _get(self, path: str) -> Any:
        if path == "/cluster":
            own = {"role": "mixed", "pool": POOL, "cost": msgspec.to_builtins(COST)}
            return {"instances": [own] if self.model else []}
        if path == "/server_info":
            return {"model": self.model}
        since_s = {"prefill_started": 0.001, "prefill_done": 0.002}
        return {
            "since_arrival_s": since_s, "prefill_instance": "mixed-0", "decode_instance": None
        }  # fmt: skip

    async def _probe(
        self, prompt: Sequence[int], num_tokens: int, request_id: str = ""
    ) -> TimedPart:
        self.longest = max(self.longest, len(prompt) + num_tokens)
        if self.longest > self.context:
            raise ProfileError("a probe failed: too long")
        record = RequestRecord(RequestId("probe"), len(prompt), NO_SLO, 0.0)
        first_s = COST.prefill_s(len(prompt), 0)
        record.first_token_s = first_s
        stages_s = {"queue_and_fetch": 0.0, "prefill": first_s}
        return TimedPart(record, stages_s, tuple(first_s + 0.01 * n for n in range(num_tokens)))


def test_probes_fit_into_a_short_context() -> None:
    served = {"vocab_size": 100, "max_model_tokens": 1024}
    cluster = FakeCluster(1024, served)
    profile = asyncio.run(cluster.measure())
    assert max(s.num_tokens for s in profile.prefills) == 512 and cluster.longest > 512


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (None, "serves no model with a known vocabulary"),
        ({"vocab_size": 0, "max_model_tokens": 4096}, "serves no model with a known vocabulary"),
        ({"vocab_size": 100, "max_model_tokens": 512}, "takes at most 512 tokens"),
    ],
)
def test_what_cannot_be_probed_is_said_at_once(model: dict[str, Any] | None, error: str) -> None:
    cluster = FakeCluster(0, model)
    with pytest.raises(ProfileError, match=error):
        asyncio.run(cluster.measure())
