"""What a request is expected to add and to cost, in effective requests."""

from __future__ import annotations

import msgspec

LEAST_TTFT_CHANCE = 0.5
"""A queue in which requests wait in vain serves no more of them than a shorter one."""
LEAST_TTFT_CHANCE_ALONE = 0.85
"""Where no decode is waited for, a prompt waits only for others, so the queue soon is as deep as
this permits. Both hold for a TTFT of which `WAITING_SHARE` or more is waiting. Where nothing is
waited for, a rejection leaves the instance idle, so the least chance falls with the waiting."""
WAITING_SHARE = 0.5
LEAST_CHANCE = 0.02
"""Requests with a smaller chance to meet both SLOs are rejected, whatever they cost."""


class ExpectedGoodput(msgspec.Struct, frozen=True):
    """What one request adds and costs, in effective requests."""

    worth: float  # its chance to meet both SLOs if no prefill waited
    ttft_chance: float
    tbt_chance: float
    harm: float  # chances that those who decode beside it lose
    prefill_cost: float
    decode_cost: float
    step_s: float  # predicted, with the request
    wait_s: float = 0.0  # from the end of the prefill until its decode can begin
    waiting_share: float = 1.0  # of the predicted TTFT, in queues
    delay: float = 0.0  # chances that those lose who arrive while its prompt is computed

    @property
    def least_ttft_chance(self) -> float:
        least = LEAST_TTFT_CHANCE if self.wait_s else LEAST_TTFT_CHANCE_ALONE
        waiting = min(self.waiting_share / WAITING_SHARE, 1.0)
        return max(least * waiting, LEAST_CHANCE)

    @property
    def gain(self) -> float:
        return self.ttft_chance * self.tbt_chance

    @property
    def cost(self) -> float:
        # At full load the price of decode and the harm to others are the same loss, seen from those
        # who would come and from those who are there.
        # So are the price of prefill and the delay of others.
        return max(self.prefill_cost, self.delay) + max(self.harm, self.decode_cost)

    @property
    def adds_more(self) -> bool:
        """Prices compare requests by their worth: the queue is the same for all of them."""
        if (
            self.gain < LEAST_CHANCE
            or self.gain < self.harm + self.delay
            or self.ttft_chance < self.least_ttft_chance
        ):
            return False
        return self.worth >= self.prefill_cost + self.decode_cost
