"""How a server of one make is asked: what it is, what it computes, and what it has cached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from moonpool.protocol.messages import AttemptSpec
from moonpool.vllm.actions import EngineOutput, SubmitRequest
from moonpool.vllm.client import VllmClient
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.forwarded import forwarded_outputs
from moonpool.vllm.known_cache import PrefixCounts


@dataclass(slots=True)
class SlotUse:
    """The slot that a request has to itself, and whether it may use what is in it. `found_tokens`:
    of its prompt, as the server then says, or None if it has not said it."""

    slot: int
    reuses: bool
    found_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server is asked to answer."""

    submit: SubmitRequest
    work: AttemptSpec
    facts: VllmFacts
    fingerprint: bytes  # of the layout
    use: SlotUse | None


class ServerDialect(ABC):
    """How servers of one make are asked. All methods raise VllmError if the server fails, and
    DialectError if it does not answer as it should. `make`: its name, for words."""

    make: str

    def __init__(self, client: VllmClient) -> None:
        self.client = client

    @abstractmethod
    async def facts(self) -> VllmFacts:
        """What a healthy server tells of itself."""

    def outputs(
        self,
        submit: SubmitRequest,
        facts: VllmFacts,
        layout_fingerprint: bytes,
        use: SlotUse | None = None,
    ) -> AsyncGenerator[EngineOutput]:
        """Has a request computed, or a call of a client answered. `use`: of a server with slots."""
        asked = Asked(submit, submit.attempt, facts, layout_fingerprint, use)
        if asked.work.call is None:
            return self.computed(asked)
        return forwarded_outputs(self.client, asked.work, self.call_body(asked))

    @abstractmethod
    def computed(self, asked: Asked) -> AsyncGenerator[EngineOutput]:
        """Has the token ids of a request continued."""

    @abstractmethod
    def call_body(self, asked: Asked) -> bytes:
        """The body of a forwarded call, as this make takes it."""

    async def counts(self) -> PrefixCounts | None:
        """The hits of its prefix cache, or None if it does not tell."""
        return None
