"""The log-probabilities of a prompt's own tokens in a response.

OpenAI's `echo` with `logprobs` lists them before those of the output; vLLM's `prompt_logprobs` has
a separate field. A model predicts nothing for a prompt's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from moonpool.api.choice import Choice
from moonpool.api.output_text.text_offsets import prompt_offsets
from moonpool.text.tokenizer import Tokenizer
from moonpool.types import Token, TokenLogprobs

Lists = dict[str, Any]
"""The `logprobs` object of a completion, whose lists have one element per token."""


class LogprobsWriter(Protocol):
    tokenizer: Tokenizer

    def logprobs(
        self, tokens: Sequence[Token], offsets: Sequence[int], as_ids: bool = False
    ) -> Lists: ...


def echoed_logprobs(
    choice: Choice, text: str, tokens: Sequence[Token], writer: LogprobsWriter, as_ids: bool
) -> Lists:
    """Returns the logprobs lists of prompt and output. `text`: the text of the prompt, as it is
    echoed."""
    prompt = choice.request.token_ids
    scored = choice.prompt_logprobs or ()
    given = [Token(token_id, found) for token_id, found in zip(prompt[1:], scored, strict=True)]
    offsets = prompt_offsets(prompt, text, writer.tokenizer)
    offsets += choice.text_offsets(len(text)).of(tokens)
    first = Token(prompt[0], TokenLogprobs(0.0))
    found = writer.logprobs([first, *given, *tokens], offsets, as_ids)
    found["token_logprobs"][0] = found["top_logprobs"][0] = None
    return found


def prompt_logprobs_field(choice: Choice, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Returns vLLM's field: for each token of the prompt, token id -> logprob, rank and text."""
    found: list[dict[str, Any] | None] = [None]
    ids = choice.request.token_ids[1:]
    for token_id, scored in zip(ids, choice.prompt_logprobs or (), strict=True):
        likely = {top_id: (logprob, rank) for rank, (top_id, logprob) in enumerate(scored.top, 1)}
        entries = {token_id: (scored.logprob, scored.rank or None)} | likely
        found.append(
            {
                str(each_id): {
                    "logprob": max(logprob, -9999.0),
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(each_id).decode("utf-8", "replace"),
                }
                for each_id, (logprob, rank) in entries.items()
            }
        )
    return found
