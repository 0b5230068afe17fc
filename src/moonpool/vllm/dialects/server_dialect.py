"""How a server of one make is asked: what it is, what it computes, and what it has cached."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from moonpool.vllm.actions import EngineOutput, SubmitRequest
from moonpool.vllm.client import VllmClient
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.known_cache import PrefixCounts


@dataclass(slots=True)
class SlotUse:
    """The slot that a request has to itself, and whether it may use what is in it. `found_tokens`:
    of its prompt, as the server then says; None: it has not said it."""

    slot: int
    reuses: bool
    found_tokens: int | None = None


class ServerDialect(Protocol):
    """How servers of one make are asked. All methods raise VllmError if the server fails, and
    DialectError if it does not answer as it should."""

    client: VllmClient

    @property
    def make(self) -> str:
        """Its name, for words: "vLLM"."""
        ...

    async def facts(self) -> VllmFacts:
        """What a healthy server tells of itself."""
        ...

    def outputs(
        self,
        submit: SubmitRequest,
        facts: VllmFacts,
        layout_fingerprint: bytes,
        use: SlotUse | None = None,
    ) -> AsyncGenerator[EngineOutput]:
        """Has a request computed. `use`: of a server with slots."""
        ...

    async def counts(self) -> PrefixCounts | None:
        """The hits of its prefix cache; None: it does not tell."""
        ...
