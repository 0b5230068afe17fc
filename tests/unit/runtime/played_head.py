"""Runs a real head behind the real HTTP application. The test stands for its only instance."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from moonpool.api.app import make_app
from moonpool.api.serving_backend import ApiOptions, ModelCard
from moonpool.conductor.conductor import Conductor
from moonpool.config.tables import Config
from moonpool.cost.fitted import FittedCost
from moonpool.head.head import ClusterHead
from moonpool.head.models.model_loading import ApiModel
from moonpool.head.models.served_model import ServedModel
from moonpool.head.worker_link import WorkerLink
from moonpool.link.auth import Identity
from moonpool.protocol.frames import Joined
from moonpool.protocol.messages import (
    Abort,
    AttemptId,
    AttemptSpec,
    AttemptTokens,
    InstanceInfo,
    InstanceLoad,
    PrefillStarted,
    Report,
    RoleChanged,
    StartPrefill,
    StepTokens,
    SwitchRole,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.types import FinishReason, InstanceId, Role, Token
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.runner import make_layout

MODEL = open_model("random:hidden=64,layers=1,heads=2,kv_heads=1,inter=64,vocab=300", "float32")
SECRET = b"a secret of the test"
NAME = InstanceId("m0")
Samples = dict[tuple[str, str], float]
"""Maps (name of a sample, its labels besides model and engine) to its value."""


class Burst(NamedTuple):
    """Returns tokens that become visible at once, one for each byte."""

    text: str
    finish: FinishReason | None = None
    embedding: bytes = b""


Step = Burst | PrefillStarted | float
Play = Callable[[AttemptSpec], Sequence[Step]]
"""The messages of an attempt: bursts, reports, and seconds of silence. 0.0 stands for the report
that its prefill begins without any cached token."""


class PlayedInstance:
    """The connection of an instance, as the head sees it, which answers commands by the play."""

    def __init__(
        self,
        head: ClusterHead,
        play: Play,
        incarnation: int = 1,
        name: InstanceId = NAME,
        role: Role = Role.MIXED,
    ) -> None:
        self.name = name
        self.role = role
        self.protocol = 11
        self.aborted: list[AttemptId] = []
        self.incarnation = incarnation
        self._play = play
        self._tasks: dict[AttemptId, asyncio.Task[None]] = {}
        self.link = WorkerLink(head, SECRET)
        self.link.channel = self  # type: ignore[assignment]
        self.link.on_open(Identity(instance_id=name, service="control", fingerprint=b""))

    def join(self) -> None:
        self.link.on_frame(Joined(info=self.info()))

    def lose(self, reason: str = "it died") -> None:
        for task in self._tasks.values():
            task.cancel()
        self.link.on_closed(reason)

    def report(self, report: Report) -> None:
        self.link.on_frame(report)

    def beat(self, **counters: float) -> None:
        """Sends a heartbeat with these counters."""
        self.report(InstanceLoad(0, 0, 0, 0, 64, {}, counters))

    def info(self) -> InstanceInfo:
        return InstanceInfo(
            instance_id=self.name,
            role=self.role,
            incarnation=self.incarnation,
            address=PeerAddress(self.name, "here", "", "127.0.0.1", 1),
            layout=make_layout(MODEL, 16),
            num_blocks=64,
            cost=FittedCost((0.0001, 0.0, 0.0, 0.0), (0.0001, 0.0, 0.0)),
            pid=1,
            host="here",
        )

    # The methods below are what a link uses of a channel.

    def send(self, *frames: Any) -> None:
        for frame in frames:
            if isinstance(frame, StartPrefill):
                attempt = frame.attempt
                self._tasks[attempt.attempt_id] = asyncio.create_task(self._act(attempt))
            elif isinstance(frame, SwitchRole):
                self.report(RoleChanged(role=frame.role))
            elif isinstance(frame, Abort):
                self.aborted.append(frame.attempt_id)
                if frame.attempt_id in self._tasks:
                    self._tasks[frame.attempt_id].cancel()

    def close(self, reason: str = "") -> None:
        pass

    abort = close

    async def _act(self, attempt: AttemptSpec) -> None:
        name = attempt.attempt_id
        for step in self._play(attempt):
            if isinstance(step, float):
                if step == 0.0:
                    self.report(PrefillStarted(name, 0, 0))
                await asyncio.sleep(step)
                continue
            if isinstance(step, PrefillStarted):
                self.report(msgspec.structs.replace(step, attempt_id=name))
                continue
            tokens = tuple(Token(byte) for byte in step.text.encode())
            if step.embedding:
                tokens = (Token(0, payload=step.embedding),)
            self.report(StepTokens(attempts=(AttemptTokens(name, tokens, step.finish),)))
            await asyncio.sleep(0)


class PlayedCluster(NamedTuple):
    head: ClusterHead
    instance: PlayedInstance
    http: httpx.AsyncClient

    @property
    def model(self) -> ServedModel:
        model = self.head.served.default
        assert model is not None
        return model

    @property
    def conductor(self) -> Conductor:
        return self.model.conductor

    def samples(self) -> Samples:
        return samples(self.head.metrics_text())


@asynccontextmanager
async def played(
    play: Play, options: ApiOptions | None = None, config: Config | None = None, **known: Any
) -> AsyncIterator[PlayedCluster]:
    """Runs a head with one mixed instance that answers by the play. `known` holds fields of the
    model's card."""
    tokenizer = ByteTokenizer()
    card = ModelCard(
        model_id="m",
        created_s=0,
        max_model_tokens=512,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        **known,
    )
    head = ClusterHead(config or Config(), ApiModel(card, tokenizer), SECRET, time.monotonic)
    ticker = asyncio.create_task(head.tick_forever())
    instance = PlayedInstance(head, play)
    instance.join()
    transport = httpx.ASGITransport(make_app(head, options))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://head") as http:
            yield PlayedCluster(head, instance, http)
    finally:
        ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticker


def samples(text: bytes) -> Samples:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            labels.pop("model_name", None)
            labels.pop("engine", None)
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[sample.name, shown] = sample.value
    return found


def moved(before: Samples, after: Samples) -> dict[str, float]:
    """Returns the growth of counters and histograms as `name{labels}`; a new series counts from
    0."""
    grown = {}
    for (name, labels), value in after.items():
        if not name.endswith(("_total", "_count", "_sum")):
            continue
        change = value - before.get((name, labels), 0.0)
        if change:
            grown[f"{name}{{{labels}}}" if labels else name] = change
    return grown
