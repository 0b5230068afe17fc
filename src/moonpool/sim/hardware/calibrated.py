"""Gives the measured cost of Mooncake's node of 8 x A800 with LLaMA3-70B (FAST'25, Fig. 14).

Prefill is a polynomial fitted to the figure, within 8 % of all its ten points. Decode follows from
two measurements: batch 1 takes 26.3 ms + 0.0345 us per context token, and batch 16 takes 1.25 times
as long as batch 1 at a context of 8192 tokens each (v3, Fig. 2). `DOMAIN` has the measured sizes;
outside of them, `sim.hardware.domain_cost` uses the node's roofline.
"""

from __future__ import annotations

from moonpool.cost.domain import CostDomain
from moonpool.cost.fitted import FittedCost

NAME = "a800-llama3-70b"
DEVICE = "A800-SXM"
SHAPE = "llama3-70b"
NUM_DEVICES = 8

PREFILL = (0.0933, 1.0893e-4, 7.62e-10, 1.973e-9)
BATCH_1_S = 0.0263
CONTEXT_TOKEN_S = 3.45e-8
BATCH_16_RATIO = 1.25
BATCH_16_CONTEXT_TOKENS = 8192
RDMA_BYTES_PER_S = 87e9
HOST_BYTES_PER_S = 99e9  # bandwidth between DRAM and HBM
DRAM_TOKENS = 3_000_000  # about 1 TB of KVCache
DOMAIN = CostDomain(
    prompt_tokens=(8192, 131_072),
    cached_share=0.95,
    decode_batch=(1, 16),
    context_tokens=(8192, 131_072),
)


def _decode() -> tuple[float, float, float]:
    """(e, f, g) of decode step time = e + f * batch + g * context tokens, in seconds."""
    context = BATCH_16_CONTEXT_TOKENS
    batch_1_s = BATCH_1_S + CONTEXT_TOKEN_S * context
    batch_16_s = BATCH_16_RATIO * batch_1_s
    request_s = (batch_16_s - batch_1_s - 15 * CONTEXT_TOKEN_S * context) / 15
    return BATCH_1_S - request_s, request_s, CONTEXT_TOKEN_S


CALIBRATED = FittedCost(
    prefill=PREFILL,
    decode=_decode(),
    transfer_latency_s=0.0,  # the transfers of the figure show no latency
    shared_memory_bytes_per_s=HOST_BYTES_PER_S,
    network_bytes_per_s=RDMA_BYTES_PER_S,
    domain=DOMAIN,
)
