"""The prompts and decodes for which a cost was measured.

A fitted formula is not valid for sizes that were not measured. `prompt_weight` blends the measured
cost with another source near the edge of the measured range, so that the estimate has no jump
there: 1 inside the domain, falling linearly to 0 at half the shortest and at twice the longest
measured prompt.
"""

from __future__ import annotations

from msgspec import structs

from moonpool.types import Struct


class CostDomain(Struct, frozen=True):
    """The smallest and the largest measured sizes. Prompts were measured one at a time.

    `cached_share`: the largest share of a prompt that was cached, which is below 1.
    `context_tokens`: the context of all requests of a decode step, added up.
    """

    prompt_tokens: tuple[int, int]
    cached_share: float
    decode_batch: tuple[int, int]
    context_tokens: tuple[int, int]

    def has_prompt(self, num_tokens: int, cached_tokens: int) -> bool:
        """Whether prompts of this length and with such a share of cached tokens were measured."""
        least, most = self.prompt_tokens
        return least <= num_tokens <= most and cached_tokens <= self.cached_share * num_tokens

    def has_decodes(self, batch: int, context_tokens: int) -> bool:
        """Whether decode steps of this size were measured."""
        inside = self.decode_batch[0] <= batch <= self.decode_batch[1]
        return inside and self.context_tokens[0] <= context_tokens <= self.context_tokens[1]

    def prompt_weight(self, num_tokens: int, cached_tokens: int) -> float:
        """Returns the weight of the measured cost for this prompt, from 0 to 1."""
        least, most = self.prompt_tokens
        weight = min(1.0, 2.0 * num_tokens / least - 1.0, 2.0 - num_tokens / most)
        if cached_tokens > self.cached_share * num_tokens:
            computed_share = 1.0 - cached_tokens / num_tokens
            weight *= computed_share / (1.0 - self.cached_share)
        return max(weight, 0.0)

    def nearest_decodes(self, batch: int, context_tokens: int) -> tuple[int, int]:
        """Returns the nearest measured batch, and the nearest measured sum of contexts."""
        least, most = self.decode_batch
        return min(max(batch, least), most), self.nearest_context(context_tokens)

    def nearest_context(self, context_tokens: int) -> int:
        least, most = self.context_tokens
        return min(max(context_tokens, least), most)

    def of_stages(self, num_stages: int) -> CostDomain:
        """Returns the domain of a pipeline whose stages have an even share of the decodes each."""
        least, most = self.decode_batch
        shortest, longest = self.context_tokens
        return structs.replace(
            self,
            decode_batch=(least * num_stages, most * num_stages),
            context_tokens=(shortest * num_stages, longest * num_stages),
        )

    def describe(self) -> str:
        """Returns the domain as a phrase."""
        prompts, batch, context = self.prompt_tokens, self.decode_batch, self.context_tokens
        return (
            f"prompts of {prompts[0]:,} to {prompts[1]:,} tokens, at most {self.cached_share:.0%}"
            f" cached, and {batch[0]:,} to {batch[1]:,} decodes with {context[0]:,} to"
            f" {context[1]:,} tokens of context in all"
        )
