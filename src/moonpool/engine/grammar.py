"""Which tokens may come next in an answer that must have a form: a JSON schema's, a regular
expression's, a grammar's.

How far the form has come follows from the tokens generated so far and from nothing else. So it does
not travel with a request: whoever draws its next token allows the same ones, on any instance,
before and after a fault. What is kept here only spares reading those tokens again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from moonpool.engine.tokenizer import Tokenizer

MAX_KEPT = 256
"""Answers whose state is kept; more at a time are read anew for each token."""
LIMITS = LLParserLimits(max_items_in_row=500, verbose_errors=False)
"""Of a form that clients send. An ambiguous grammar costs as many items squared: with these 10 ms
for a token, where llguidance's own 2,000 cost half a second. JSON schemas have tens."""
log = logging.getLogger("moonpool.engine")

Mask = NDArray[np.bool_]


class Grammars:
    """Of one model, whose answers end with one of `ends`. Used by one thread. `open_tokenizer` is
    called when first needed, or by `prepare`."""

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer], vocab_size: int, ends: Collection[int]
    ) -> None:
        self._open_tokenizer = open_tokenizer
        self._vocab_size = vocab_size
        self._ends = [end for end in ends if end < vocab_size]
        self._words: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Does now what takes up to a second, for large vocabularies. Nothing for a model that
        cannot end an answer: the head promises no form of its. Raises `TokenizerError`."""
        if self._words is None and self._ends:
            self._words = _words_of(self._open_tokenizer(), self._vocab_size, self._ends)

    def allowed(self, grammar: str, generated: Sequence[int]) -> Mask:
        """[vocab_size]: what may follow `generated`. What ends an answer may where its form is
        complete, and must where nothing else can follow."""
        matcher = self._matcher(grammar, tuple(generated))
        mask = np.zeros(self._vocab_size, np.bool_)
        if not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            mask[: len(found)] = found
        may_end = matcher.is_accepting() or not mask.any()
        mask[self._ends] = may_end
        if matcher.is_error():  # the head tells the client (see `api.forms`)
            why = matcher.get_error().partition("\n")[0]
            log.warning("an answer ends, as its form cannot be followed: %s", why)
        return mask

    def _matcher(self, grammar: str, generated: tuple[int, ...]) -> LLMatcher:
        """As it is after `generated`."""
        matcher = self._kept.pop((grammar, generated[:-1]), None) if generated else None
        if matcher is not None:
            matcher.consume_token(generated[-1])
        else:
            self.prepare()
            assert self._words is not None
            matcher = LLMatcher(self._words, grammar, log_level=0, limits=LIMITS)
            matcher.consume_tokens(list(generated))
        self._kept[grammar, generated] = matcher
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return matcher


def keeps(grammar: str, text: str) -> bool:
    """Whether a whole answer has that form."""
    matcher = LLMatcher(_single_bytes(), grammar, log_level=0, limits=LIMITS)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@cache
def _single_bytes() -> LLTokenizer:
    return LLTokenizer("byte")  # takes 2 ms


class _Vocabulary:
    """A tokenizer as llguidance wants it. Special tokens are no text: no form allows them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [i for i in tokenizer.special_token_ids if i < vocab_size]
        self.eos_token_id = ends[0]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)


def _words_of(tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> LLTokenizer:
    vocabulary = _Vocabulary(tokenizer, vocab_size, ends)
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=ends)
