"""A head whose answers are written down by the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from moonpool.api.frontend import ModelCard, Output
from moonpool.engine.tokenizer import Tokenizer
from moonpool.engine.tokenizers.byte import ByteTokenizer
from moonpool.types import FinishReason, Request, RequestId, Slo, Token, TokenLogprobs

Step = Output | Exception | float  # a float: seconds of silence
Script = Callable[[Request], Sequence[Step]]


def spoken(
    *texts: str,
    finish: FinishReason | None = FinishReason.STOP,
    cached_tokens: int = 0,
    timings_s: dict[str, float] | None = None,
) -> list[Step]:
    """One output per text, each byte a token; the last one ends the answer."""
    steps: list[Step] = [
        Output(tokens=tuple(Token(b) for b in text.encode()), cached_tokens=cached_tokens)
        for text in texts
    ]
    if finish is not None:
        steps.append(Output(finish_reason=finish, cached_tokens=cached_tokens, timings_s=timings_s))
    return steps


def one_by_one(data: bytes, *, logprobs: bool = False) -> list[Step]:
    """One output per byte."""
    steps: list[Step] = []
    for byte in data:
        found = TokenLogprobs(-0.5, ((byte, -0.5), (32, -1.5))) if logprobs else None
        steps.append(Output(tokens=(Token(byte, found),)))
    steps.append(Output(finish_reason=FinishReason.LENGTH))
    return steps


class FakeHead:
    """Implements `Frontend`. Records what it was asked and which requests were left early."""

    def __init__(self, script: Script | None = None, tokenizer: Tokenizer | None = None):
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self.card = ModelCard(
            model_id="fake",
            created_s=1_700_000_000,
            max_model_tokens=256,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        self.default_slo = Slo(ttft_s=30.0, tbt_s=0.1)
        self.request_timeout_s = 60.0
        self.now = time.monotonic
        self.script: Script = script or (lambda request: spoken("Hello"))
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.is_healthy = True
        self.explanations: dict[str, dict[str, Any]] = {}

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        self.requests.append(request)
        ended = False
        try:
            for step in self.script(request):
                if isinstance(step, Exception):
                    ended = True
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                ended = step.finish_reason is not None
                yield step
        finally:
            if not ended:
                self.abort(request.request_id)

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    def explain(self, request_id: str) -> dict[str, Any] | None:
        return self.explanations.get(request_id)

    def cluster(self) -> dict[str, Any]:
        return {"instances": []}

    def server_info(self) -> dict[str, Any]:
        return {"model": "fake"}

    def healthy(self) -> bool:
        return self.is_healthy

    def metrics_text(self) -> bytes:
        return b"# nothing\n"
