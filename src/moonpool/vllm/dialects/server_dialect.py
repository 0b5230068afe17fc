"""Defines how servers of one make are asked: for their facts, for answers, and for the hits of
their prefix cache."""

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
    """The slot that a request has to itself, and whether it may use the slot's content.
    `found_tokens`: the cached tokens of its prompt, as the server reports them, or None before
    that."""

    slot: int
    reuses: bool
    found_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that a server is to answer."""

    submit: SubmitRequest
    work: AttemptSpec
    facts: VllmFacts
    fingerprint: bytes  # fingerprint of the block layout
    use: SlotUse | None


class ServerDialect(ABC):
    """How servers of one make are asked. All methods raise VllmError if the server fails, and
    DialectError if its answer is not as expected. `make`: the name of the make, for messages."""

    make: str

    def __init__(self, client: VllmClient) -> None:
        self.client = client

    @abstractmethod
    async def facts(self) -> VllmFacts:
        """Returns what a healthy server tells about itself."""

    def outputs(
        self,
        submit: SubmitRequest,
        facts: VllmFacts,
        layout_fingerprint: bytes,
        use: SlotUse | None = None,
    ) -> AsyncGenerator[EngineOutput]:
        """Has a request computed, or a client's call answered, and yields the outputs. `use`: the
        slot to use, of a server with slots. An empty `layout_fingerprint` means that the server is
        being measured."""
        asked = Asked(submit, submit.attempt, facts, layout_fingerprint, use)
        if asked.work.call is None:
            return self.computed(asked)
        return forwarded_outputs(self.client, asked.work, self.call_body(asked))

    @abstractmethod
    def computed(self, asked: Asked) -> AsyncGenerator[EngineOutput]:
        """Sends the token ids of a request to the server, and yields the tokens that follow."""

    @abstractmethod
    def call_body(self, asked: Asked) -> bytes:
        """Returns the body of a forwarded call, in the form that this kind of server accepts."""

    async def counts(self) -> PrefixCounts | None:
        """Returns the hits of the server's prefix cache, or None if the server does not tell."""
        return None
