"""What is wrong with a model's files, and the numbers that none of them may exceed."""

from __future__ import annotations

_COUNTS = (
    "num_hidden_layers", "num_layers", "num_nextn_predict_layers", "num_experts",
    "num_local_experts", "n_routed_experts", "n_shared_experts",
)  # fmt: skip
_HEAD_SIZES = ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
LARGEST_TOKEN = 2**31 - 1
LARGEST = {
    **dict.fromkeys(_COUNTS, 4096),
    **dict.fromkeys(_HEAD_SIZES, 1 << 16),
    "max_position_embeddings": 1 << 22,
    "sliding_window": LARGEST_TOKEN,
}
LARGEST_SIZE = 1 << 24
LARGEST_EXPERTS = 1 << 17  # the most experts of all layers together
LARGEST_NUMBER = 1e30
"""No model has numbers near this one. A larger number would fill the memory before any weight is
read."""


class ModelError(ValueError):
    """The model cannot be served; the message says why and what to do."""
