"""Workloads for the proof of `plan`, generated from seeds: anybody gets the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from moonpool.trace.builtin import BUILT_IN, CHATS, CONVERSATION, DOCUMENTS, TOOLAGENT
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.profile import GeneratorProfile
from moonpool.trace.row import TraceRow

A800, H100 = "A800-SXM:8", "H100-SXM:4"


class ProofWorkload(NamedTuple):
    """A generated trace, the nodes to plan with, and the SLOs."""

    name: str
    profile: GeneratorProfile
    rate_rps: float
    seed: int
    devices: str = A800
    ttft_s: float = 30.0
    tbt_s: float = 0.1
    times: int = 1  # multiple of the requests of other workloads

    def rows(self, num_requests: int) -> tuple[TraceRow, ...]:
        """Returns the first `num_requests` requests, or a multiple of that number."""
        found = generate(
            self.profile,
            num_requests=num_requests * self.times,
            seed=self.seed,
            rate_rps=self.rate_rps,
        )
        return tuple(found)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the trace; 0 means that it has no hashes."""
        return BLOCK_TOKENS if self.profile.has_hashes else 0


def _with(profile: GeneratorProfile, **changes: object) -> GeneratorProfile:
    change: Callable[..., GeneratorProfile] = msgspec.structs.replace
    return change(profile, **changes)


_BURSTY = {"burst_short_cv2": 2.0, "burst_long_cv2": 0.2}
_SHORT = _with(CHATS, name="short", output_tokens=(60.0,), has_hashes=False)

PROOF_WORKLOADS = (
    ProofWorkload("conversation", CONVERSATION, 2.0, 11),
    ProofWorkload("conversation, bursty", _with(CONVERSATION, **_BURSTY), 1.5, 12),
    ProofWorkload("conversation, no hashes", _with(CONVERSATION, has_hashes=False), 1.5, 13),
    ProofWorkload("conversation on H100, short TTFT", CONVERSATION, 2.0, 14, H100, 10.0),
    ProofWorkload("agents", TOOLAGENT, 3.5, 15),
    ProofWorkload("agents, bursty, on H100", _with(TOOLAGENT, **_BURSTY), 6.0, 16, H100, 15.0),
    ProofWorkload("shared documents", BUILT_IN["l-eval"], 1.5, 17),
    ProofWorkload("half cached, 16k", BUILT_IN["simulated-16k"], 1.5, 18, H100, 15.0),
    ProofWorkload("papers, nothing shared", BUILT_IN["arxiv-sum"], 2.2, 19),
    ProofWorkload("long documents, nothing shared", DOCUMENTS, 1.5, 20, H100),
    ProofWorkload("chats, long answers", CHATS, 2.5, 21),
    ProofWorkload(
        "short, bursty, no hashes", _with(_SHORT, **_BURSTY), 10.0, 22, H100, 5.0, 0.03, 4
    ),
)
"""Workloads with bursts and without block hashes, with short and long prompts, and with hot and
cold caches."""
