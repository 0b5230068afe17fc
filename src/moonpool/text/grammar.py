"""Structured output (guided decoding): which tokens a JSON schema, regular expression or grammar
allows next.

The state of a grammar is a function of the tokens generated so far. The state is therefore not sent
with a request: every instance that draws the next token allows the same tokens, before and after a
fault. The matchers kept here are only a cache, which saves reading those tokens again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from moonpool.text.tokenizer import Vocabulary

MAX_KEPT = 256
"""Matchers in the cache. With more answers at a time, some are read again for each token."""
LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=40_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
"""Limits on grammars from clients. The cost of an ambiguous grammar grows with the square of its
items per row. At 500 items a token takes 10 ms; at llguidance's default of 2,000, half a second.
JSON schemas have tens of rules. The lexer's limits are a fifth of the defaults and less:
`(a{1000}){1000}` takes half a second and 50 MB with them, and 2 s and 180 MB without."""
log = logging.getLogger("moonpool_engine.engine")

Mask = NDArray[np.bool_]


class Grammars:
    """The matchers of one model, whose answers end with one of `ends`. One thread uses these
    grammars.

    `open_vocabulary` is called at first use, or by `prepare`.
    """

    can_wait = False
    """Whether `prepare` may wait until the engine pauses: the first answer comes sooner then."""

    def __init__(
        self, open_vocabulary: Callable[[], Vocabulary], vocab_size: int, ends: Collection[int]
    ) -> None:
        self._open_vocabulary = open_vocabulary
        self._vocab_size = vocab_size
        self._ends = [end for end in ends if end < vocab_size]
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Reads the vocabulary now, which takes up to a second for a large one.

        Does nothing for a model without end tokens: the API refuses structured output there.
        Raises `TokenizerError`.
        """
        if self._vocabulary is None and self._ends:
            self._vocabulary = _read_vocabulary(
                self._open_vocabulary(), self._vocab_size, self._ends
            )

    def allowed(self, grammar: str, generated: Sequence[int]) -> Mask:
        """[vocab_size] bool: the tokens that may follow `generated`.

        End tokens are allowed where the answer is complete, and where no other token is possible.
        """
        matcher = self._matcher(grammar, tuple(generated))
        mask = np.zeros(self._vocab_size, np.bool_)
        if not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            mask[: len(found)] = found
        may_end = matcher.is_accepting() or not mask.any()
        mask[self._ends] = may_end
        if matcher.is_error():  # the API reports it to the client (`api.structured_output`)
            why = matcher.get_error().partition("\n")[0]
            log.warning("an answer ends because its grammar cannot be followed: %s", why)
        return mask

    def _matcher(self, grammar: str, generated: tuple[int, ...]) -> LLMatcher:
        """The matcher in its state after `generated`."""
        matcher = self._kept.pop((grammar, generated[:-1]), None) if generated else None
        if matcher is not None:
            matcher.consume_token(generated[-1])
        else:
            self.prepare()
            assert self._vocabulary is not None
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)
            matcher.consume_tokens(list(generated))
        self._kept[grammar, generated] = matcher
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return matcher


def matches_grammar(grammar: str, text: str) -> bool:
    """Whether `text` is a complete answer under `grammar`."""
    matcher = LLMatcher(_single_bytes(), grammar, log_level=0, limits=LIMITS)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def first_error(grammar: str) -> str:
    """Why `grammar` is invalid or could not be followed from its first character on; "" if it can.

    May take seconds, and end the process: llguidance recurses without a bound of its own.

    The compiler accepts a grammar with too many alternatives in one place, such as an object with
    thousands of properties. That shows at the opening brace at the latest.
    """
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if is_error:
        return str(messages[0])
    matcher = LLMatcher(_single_bytes(), grammar, log_level=0, limits=LIMITS)
    mask = matcher.compute_bitmask()
    if not matcher.is_error() and mask[_BRACE // 8] >> _BRACE % 8 & 1:
        matcher.consume_token(_BRACE)
    return str(matcher.get_error()).partition("\n")[0] if matcher.is_error() else ""


_BRACE = ord("{")


@cache
def _single_bytes() -> LLTokenizer:
    return LLTokenizer("byte")  # made once, because this takes a few milliseconds


class _LlguidanceVocabulary(TokenizerWrapper):
    """The tokens as `LLTokenizer` reads them. Special tokens are not text and never allowed.

    The constructor does not call llguidance's, which encodes a text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, ends: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [i for i in vocabulary.special_token_ids if i < vocab_size]
        self.eos_token_id = ends[0]

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, add_special_tokens=False)


def _read_vocabulary(vocabulary: Vocabulary, vocab_size: int, ends: list[int]) -> LLTokenizer:
    return LLTokenizer(_LlguidanceVocabulary(vocabulary, vocab_size, ends), eos_token=ends)
