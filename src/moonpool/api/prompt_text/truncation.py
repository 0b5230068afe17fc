"""Shortens a prompt to a number of tokens (`truncate_prompt_tokens`), as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from moonpool.api.bodies import EmbeddingsBody, GenerationBody
from moonpool.api.errors import ApiError


class Truncation(NamedTuple):
    """`num_tokens`: the most that are kept. `side`: the side that is cut off."""

    num_tokens: int
    side: Literal["left", "right"]

    def cut(self, token_ids: Sequence[int], num_before: int = 0, num_after: int = 0) -> list[int]:
        """Returns the tokens that are kept. The first `num_before` and the last `num_after` are no
        part of the text, and stay as far as there is room."""
        ids = list(token_ids)
        if len(ids) <= self.num_tokens:
            return ids
        inner = ids[num_before : len(ids) - num_after]
        before, after = ids[:num_before], ids[len(ids) - num_after :] if num_after else []
        room = self.num_tokens - len(before) - len(after)
        if room <= 0:
            return self._one_side(ids, self.num_tokens)
        return [*before, *self._one_side(inner, room), *after]

    def cut_text(self, text: str, most_chars_per_token: int) -> str:
        """Returns a part of a long text that has all the tokens that are kept."""
        most = self.num_tokens * most_chars_per_token
        if len(text) <= most:
            return text
        return text[-most:] if self.side == "left" else text[:most]

    def _one_side(self, ids: list[int], count: int) -> list[int]:
        return ids[len(ids) - count :] if self.side == "left" else ids[:count]


def truncation_of(
    body: GenerationBody | EmbeddingsBody, max_model_tokens: int, num_output_tokens: int | None
) -> Truncation | None:
    """Returns how prompts are shortened; None if they are not. Raises ApiError.

    `num_output_tokens`: the tokens that the call asks for, or None if it generates none. -1 keeps
    as many tokens as fit beside them.
    """
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return None
    generates = num_output_tokens is not None
    most = max_model_tokens - 1 if generates else max_model_tokens
    if wanted != -1 and not 1 <= wanted <= most:
        text = (
            f"Invalid value for 'truncate_prompt_tokens': {str(wanted)[:40]}. It must be -1, or "
            f"between 1 and {most}."
        )
        raise ApiError(text, param="truncate_prompt_tokens")
    if wanted == -1:
        wanted = max_model_tokens - max(num_output_tokens or 0, int(generates))
        if wanted < 1:
            text = (
                f"'truncate_prompt_tokens' leaves no prompt: {num_output_tokens} tokens of output "
                f"take the whole context of {max_model_tokens}. Lower 'max_tokens'."
            )
            raise ApiError(text, param="truncate_prompt_tokens")
    return Truncation(wanted, body.truncation_side or ("left" if generates else "right"))
