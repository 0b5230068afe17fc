"""Computes in advance the correct answer of every request of a run.

A token is a pure function of all tokens before it and of (seed, position). "KVCache content" is a
number that stands for the whole prefix and the tenant that may share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.protocol.block_layout import BlockLayout, block_keys, root_key
from moonpool.types import BlockKey, FinishReason, Request, SamplingParams

VOCABULARY = 97
EOS = 0
OTHER = 8
"""A token that ends no answer."""

Content = tuple[int, int]
"""The content of one layer slice of a block, as (layer, number of the prefix)."""


def draw(prefix: int, seed: int, position: int) -> int:
    return hash((prefix, seed, position)) % VOCABULARY


def next_token(prefix: int, sampling: SamplingParams, position: int, num_done: int) -> int:
    """Returns the token after a prefix. Greedy answers do not depend on the seed. As in vLLM,
    tokens that would end an answer are not drawn before the answer has its least length."""
    if sampling.temperature:
        return draw(prefix, sampling.seed, position)
    return greedy(prefix, position, sampling, num_done < sampling.min_tokens)


def greedy(prefix: int, position: int, sampling: SamplingParams, goes_on: bool) -> int:
    token = draw(prefix, 0, position)
    return OTHER if goes_on and token in (EOS, *sampling.stop_token_ids) else token


@dataclass(frozen=True)
class Truth:
    """Holds one request, its correct answer, and the correct content of each of its prefixes."""

    request: Request
    tokens: tuple[int, ...]  # the tokens of prompt and answer
    finish: FinishReason
    contents: tuple[int, ...]  # contents[n] is the content of the KVCache after n tokens

    @property
    def answer(self) -> tuple[int, ...]:
        return self.tokens[self.request.num_prompt_tokens :]

    def slice_content(self, layer: int, index: int, num_tokens: int, block_tokens: int) -> Content:
        """Returns the layer slice of block `index` after the first `num_tokens` tokens are
        computed."""
        return layer, self.contents[min(num_tokens, (index + 1) * block_tokens)]

    def named_contents(self, layout: BlockLayout) -> dict[BlockKey, int]:
        root = root_key(layout.fingerprint, self.request.tenant)
        keys = block_keys(self.tokens, layout.block_tokens, root)
        return {
            key: self.contents[(index + 1) * layout.block_tokens] for index, key in enumerate(keys)
        }


def find_truth(request: Request) -> Truth:
    """Computes the answer by its definition, token by token."""
    sampling = request.sampling
    tokens = list(request.token_ids)
    prefix = 0
    for token in tokens:
        prefix = hash((prefix, token))
    finish: FinishReason | None = None
    while finish is None:
        num_done = len(tokens) - request.num_prompt_tokens
        token = next_token(prefix, sampling, len(tokens), num_done)
        tokens.append(token)
        prefix = hash((prefix, token))
        num_generated = len(tokens) - request.num_prompt_tokens
        if num_generated >= sampling.min_tokens and (
            (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        ):
            finish = FinishReason.STOP
        elif num_generated == sampling.max_tokens:
            finish = FinishReason.LENGTH
    return Truth(request, tuple(tokens), finish, _contents(request, tokens))


def _contents(request: Request, tokens: Sequence[int]) -> tuple[int, ...]:
    # The content includes the tenant, so that a check notices a leak between tenants.
    owner = request.tenant if request.use_cache else f"private {request.request_id}"
    contents = [int.from_bytes(owner.encode(), "little") % (1 << 61)]
    for token in tokens:
        contents.append(hash((contents[-1], token, 1)))
    return tuple(contents)
