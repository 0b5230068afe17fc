"""Runs a Conductor for tests that stand for its instances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from moonpool.conductor.actions import (
    ConductorAction,
    ConductorEvent,
    InstanceJoined,
    Reported,
    RequestArrived,
    Send,
)
from moonpool.conductor.conductor import DEFAULT_SLO, Conductor
from moonpool.config.tables import ConductorConfig
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import (
    AttemptId,
    AttemptTokens,
    DecodeAccepted,
    InstanceInfo,
    PrefillDone,
    Report,
    StepTokens,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import (
    FinishReason,
    InstanceId,
    Request,
    RequestId,
    Role,
    SamplingParams,
    Slo,
    Token,
)

T = TypeVar("T")
COST = FittedCost(prefill=(0.0, 0.001, 0.0, 0.0), decode=(0.01, 0.001, 0.0))
LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
)
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
PROMPT = tuple(range(10))


class Desk:
    """A Conductor that checks its reservations after each event."""

    def __init__(
        self,
        *names: str,
        num_blocks: int = 1000,
        chunk_tokens: int = 0,
        weights: Mapping[str, float] | None = None,
        default_slo: Slo = DEFAULT_SLO,
        cost: FittedCost = COST,
        layout: BlockLayout = LAYOUT,
        **config: Any,
    ) -> None:
        self.conductor = Conductor(
            ConductorConfig(**config), default_slo=default_slo, tenant_weights=weights
        )
        self.now = 0.0
        self.num_blocks = num_blocks
        self.chunk_tokens = chunk_tokens
        self.cost = cost
        self.layout = layout
        for name in names:
            self.join(name)

    def join(self, name: str, incarnation: int = 1) -> list[ConductorAction]:
        address = PeerAddress(
            instance_id=InstanceId(name), host_id="h", unix_name="", tcp_host="x", tcp_port=1
        )
        info = InstanceInfo(
            instance_id=InstanceId(name),
            role=ROLES[name[0]],
            incarnation=incarnation,
            address=address,
            layout=self.layout,
            num_blocks=self.num_blocks,
            chunk_tokens=self.chunk_tokens,
            cost=self.cost,
            pid=1,
            host="x",
        )
        return self.handle(InstanceJoined(info))

    def handle(self, event: ConductorEvent) -> list[ConductorAction]:
        actions = self.conductor.handle(event, self.now)
        self.conductor.validate()
        return actions

    def ask(self, name: str = "r", **known: Any) -> list[ConductorAction]:
        sampling = {
            "max_tokens": known.pop("max_tokens", 8),
            "pooling": known.pop("pooling", "none"),
            **known.pop("sampling", {}),
        }
        stated = known.pop("stated", True)
        slo = Slo(
            ttft_s=known.pop("ttft_s", 30.0),
            tbt_s=known.pop("tbt_s", 1.0),
            ttft_stated=stated,
            tbt_stated=stated,
        )
        values = {"token_ids": PROMPT, "deadline_s": self.now + 60.0, **known}
        request = Request(
            request_id=RequestId(name),
            sampling=SamplingParams(**sampling),
            slo=slo,
            arrived_s=self.now,
            **values,
        )
        return self.handle(RequestArrived(request))

    def report(self, name: str, report: Report) -> list[ConductorAction]:
        return self.handle(Reported(InstanceId(name), report))

    def prefilled(self, work: str = "r/1", token: int = 50) -> list[ConductorAction]:
        return self.report("p0", PrefillDone(attempt_id=AttemptId(work), token=Token(token)))

    def decoding(self, work: str = "r/1", token: int = 50) -> list[ConductorAction]:
        self.prefilled(work, token)
        return self.report("d0", DecodeAccepted(attempt_id=AttemptId(work)))

    def tokens(
        self, name: str, *tokens: int, finish: FinishReason | None = None, work: str = "r/1"
    ) -> list[ConductorAction]:
        item = AttemptTokens(
            attempt_id=AttemptId(work), tokens=tuple(Token(t) for t in tokens), finish=finish
        )
        return self.report(name, StepTokens(attempts=(item,)))

    def assert_nothing_is_booked(self) -> None:
        assert not self.conductor.requests
        for state in self.conductor.instances.values():
            assert not (state.prefills or state.decodes or state.handed_over or state.serving)
            assert not self.conductor.index.expected(state.info.instance_id)


def of(actions: list[ConductorAction], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: list[ConductorAction], kind: type[T]) -> list[tuple[str, T]]:
    return [(s.instance_id, s.command) for s in of(actions, Send) if isinstance(s.command, kind)]
