"""The default cluster of `moonpool simulate` and `plan`: that of Mooncake (FAST'25 section 5)."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    # Nodes of 8 x A800 that serve LLaMA3-70B are also the defaults of [hardware].
    "cluster": {"prefill": 8, "decode": 8, "mixed": 0},
    "slo": {"ttft_s": 30.0, "tbt_s": 0.1},
    # The paper's experiments use blocks of 256 tokens and DRAM for 3 M tokens on each node.
    "pool": {"block_tokens": 256, "dram_tokens_per_instance": 3_000_000},
    # The paper says ">1000 tokens" of its prefill chunk; at 2048 the prefill rate is flat.
    "engine": {"chunk_tokens": 2048, "max_sequences": 512},
    "api": {"request_timeout_s": 600.0},
}
