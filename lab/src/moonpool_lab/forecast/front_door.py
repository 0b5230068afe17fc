"""Sends single requests to an OpenAI-compatible server and times each token of the answers.

This module uses only what a client sees of a server: the time of each piece of a stream, and the
usage at the stream's end.
"""

from __future__ import annotations

import asyncio
import re
from random import Random
from statistics import median
from time import monotonic

import msgspec

from moonpool.http_client.client import HttpClient
from moonpool.request_record import RequestRecord
from moonpool.types import MALFORMED, RequestId
from moonpool_lab.replay.prompts import WORDS
from moonpool_lab.replay.server import ServerFacts, ServerUnfitError
from moonpool_lab.replay.stream import NO_SLO, TokenTimesReceiver

NO_SLO_HEADERS = b"X-SLO-TTFT-ms: 1e9\r\nX-SLO-TPOT-ms: 1e9\r\n"
"""These headers state SLOs that no request misses on a moonpool server. The server may still refuse
a request in favour of others. Other servers ignore these headers."""
ROUND_TRIPS = 7
UNSAID = -1
TRIES = 4
"""Number of tries, because a moonpool server refuses a long prompt if the recent load suggests that
several shorter prompts could be served instead. The prompts of the measurement are such a load."""
MOST_WAIT_S = 5.0

_CACHE_BLOCKS = re.compile(rb"^vllm:cache_config_info\{.*$", re.MULTILINE)
_BLOCK_SIZE, _NUM_BLOCKS = (
    re.compile(rb'block_size="(\d+)"'),
    re.compile(rb'num_gpu_blocks="(\d+)"'),
)

Prompt = list[int]
"""Token ids below the size of the vocabulary, or indices in `WORDS`."""


class _Generation(msgspec.Struct):
    n_ctx: int = 0


class _Props(msgspec.Struct):
    """The fields of llama-server's answer to `/props` that this module uses."""

    default_generation_settings: _Generation = msgspec.field(default_factory=_Generation)


class TimedAnswer(msgspec.Struct, frozen=True):
    """An answer with its times. `began_s` and `token_s` are times of one clock."""

    began_s: float
    token_s: tuple[float, ...]
    cached_tokens: int | None  # None if the server does not say

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.began_s


class FrontDoor:
    """A connection to a server that uses only what clients of the server see."""

    def __init__(self, client: HttpClient, facts: ServerFacts, vocab_size: int, as_text: bool):
        self._client = client
        self._facts = facts
        self._vocab_size = len(WORDS) if as_text else vocab_size
        self._as_text = as_text
        self._random = Random(20)

    @property
    def longest_tokens(self) -> int | None:
        """The most tokens of a prompt with its answer, or None if the server does not tell it."""
        return self._facts.max_model_tokens

    def prompt(self, num_tokens: int) -> Prompt:
        """Returns a prompt that was never sent before."""
        return [self._random.randrange(self._vocab_size) for _ in range(num_tokens)]

    async def round_trip_s(self) -> float:
        """Returns the time of a request that computes nothing."""
        times_s = []
        for _ in range(ROUND_TRIPS):
            began_s = monotonic()
            await self._client.get("/v1/models")
            times_s.append(monotonic() - began_s)
        return median(times_s)

    @staticmethod
    async def context_tokens(client: HttpClient, facts: ServerFacts) -> int | None:
        """Returns the most tokens of a prompt with its answer, from `/v1/models` or from a slot of
        llama-server, or None if the server reports neither."""
        if facts.max_model_tokens is not None:
            return facts.max_model_tokens
        status, body = await client.get("/props")
        if status != 200:
            return None
        try:
            return msgspec.json.decode(body, type=_Props).default_generation_settings.n_ctx or None
        except MALFORMED:
            return None

    async def cache_tokens(self) -> int:
        """Returns the KVCache tokens of one engine from vLLM's metrics, or 0 without them."""
        status, body = await self._client.get("/metrics")
        found = _CACHE_BLOCKS.search(body) if status == 200 else None
        size = _BLOCK_SIZE.search(found[0]) if found else None
        count = _NUM_BLOCKS.search(found[0]) if found else None
        return int(size[1]) * int(count[1]) if size and count else 0

    async def ask(self, prompt: Prompt, num_tokens: int) -> TimedAnswer:
        """Sends a prompt, sends it again if it is refused, and times the answer of the last try.
        Raises ConnectionFailedError, and ServerUnfitError if no complete answer comes."""
        for number in range(TRIES):
            began_s = monotonic()
            record = RequestRecord(RequestId("probe"), len(prompt), NO_SLO, began_s)
            record.cached_tokens = UNSAID
            receiver = TokenTimesReceiver(record)
            await self._client.post(
                "/v1/completions", self._body(prompt, num_tokens), receiver, NO_SLO_HEADERS
            )
            receiver.on_end()
            if receiver.status != 429 or number == TRIES - 1:
                break
            await asyncio.sleep(min(receiver.retry_after_s or 1.0, MOST_WAIT_S))
        if receiver.error_code or not receiver.token_s:
            why = receiver.error_message or receiver.error_code or "no token came"
            raise ServerUnfitError(
                f"{self._client.url} cannot be measured: a prompt of {len(prompt)} tokens"
                f" failed: {why}"
            )
        cached_tokens = None if record.cached_tokens == UNSAID else record.cached_tokens
        return TimedAnswer(began_s, tuple(receiver.token_s), cached_tokens)

    async def ask_together(self, prompts: list[Prompt], num_tokens: int) -> list[TimedAnswer]:
        return list(await asyncio.gather(*(self.ask(prompt, num_tokens) for prompt in prompts)))

    def _body(self, prompt: Prompt, num_tokens: int) -> bytes:
        sent: object = " ".join(WORDS[word] for word in prompt) if self._as_text else prompt
        return msgspec.json.encode(
            {
                "model": self._facts.model,
                "prompt": sent,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "max_tokens": num_tokens,
            }
        )
