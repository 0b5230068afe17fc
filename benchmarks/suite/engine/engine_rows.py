"""Defines the steps that are compared between engines, and the least arithmetic and bytes of each,
for comparison with the machine's limits."""

from __future__ import annotations

from moonpool.types import Struct
from moonpool_engine.engine.spec import ModelSpec

ELEMENT_BYTES = 2


class EngineBenchRows(Struct, frozen=True):
    """Prompts alone, by length; and decodes by batch and by the context of each. `chunk_tokens`:
    size of the chunks into which prompts are cut, at every engine. `steps`: number of steps of
    decodes that are timed for a row."""

    prefills: tuple[int, ...] = (512, 2048, 8192)
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (512, 4096)
    chunk_tokens: int = 512
    steps: int = 32

    @property
    def longest_tokens(self) -> int:
        """Returns the length of the longest sequence."""
        return max(*self.prefills, *(context + self.steps for context in self.contexts)) + 2

    @property
    def kv_tokens(self) -> int:
        """Returns the tokens of KVCache in use at once; the last block of each sequence counts as a
        whole."""
        most = max(self.batches) * (max(self.contexts) + self.steps + 64)
        return max(most, max(self.prefills) + 64)

    def lengths(self, batch: int, context: int) -> list[tuple[int, int]]:
        """Prompt and answer of each of `batch` sequences, given in this order, that decode together
        at about `context` tokens. The first sequences decode while the prompts of the others are
        computed. Earlier contexts begin shorter by the tokens that they gain meanwhile, so that all
        have the same length when the last one joins."""
        per_prompt = -(-context // self.chunk_tokens)
        early = [min((batch - 1 - i) * per_prompt, context // 2) for i in range(batch)]
        return [(context - tokens, tokens + self.steps + 1) for tokens in early]


def prefill_flops(spec: ModelSpec, num_tokens: int) -> float:
    """Arithmetic of one prompt: linears of all tokens, causal attention, one row of logits."""
    linears = 2.0 * num_tokens * spec.num_layers * _layer_weights(spec)
    q = spec.num_heads * spec.head_dim
    attention = 4.0 * spec.num_layers * q * num_tokens * (num_tokens + 1) / 2
    return linears + attention + 2.0 * spec.hidden_size * spec.vocab_size


def prefill_bytes(
    spec: ModelSpec, num_tokens: int, chunk_tokens: int, weight_bytes: float = ELEMENT_BYTES
) -> float:
    """Returns the bytes that one prompt must read: all weights with every chunk, and the KVCache
    before it."""
    chunks = -(-num_tokens // chunk_tokens)
    before = chunk_tokens * chunks * (chunks - 1) / 2
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * ELEMENT_BYTES
    return chunks * weight_bytes * spec.num_layers * _layer_weights(spec) + before * kv


def decode_flops(spec: ModelSpec, batch: int, context_tokens: float) -> float:
    """Arithmetic of one step of decodes alone."""
    weights = spec.num_layers * _layer_weights(spec) + spec.hidden_size * spec.vocab_size
    attention = 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * context_tokens
    return batch * (2.0 * weights + attention)


def decode_bytes(
    spec: ModelSpec, batch: int, context_tokens: float, weight_bytes: float = ELEMENT_BYTES
) -> float:
    """Returns the bytes that one step of decodes must read: all weights but the embedding table
    once, and the KVCache of every sequence."""
    weights = spec.num_layers * _layer_weights(spec) + spec.hidden_size * spec.vocab_size
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * context_tokens
    return weight_bytes * weights + batch * ELEMENT_BYTES * kv


def _layer_weights(spec: ModelSpec) -> int:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.hidden_size * (2 * q + 2 * kv) + 3 * spec.hidden_size * spec.intermediate_size
