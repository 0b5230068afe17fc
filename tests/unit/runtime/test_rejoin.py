"""Runs head and workers in one process, over real sockets, with connections that come and go out of
order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from moonpool.api.serving_backend import ModelCard
from moonpool.config.tables import Config
from moonpool.cores import CoreShare
from moonpool.cost.fitted import FittedCost
from moonpool.head import head as head_module
from moonpool.head.head import ClusterHead
from moonpool.head.models.model_loading import ApiModel
from moonpool.head.worker_link import WorkerLink
from moonpool.link.auth import Identity
from moonpool.link.silence import MAX_TURN_S
from moonpool.plugins.workers import WorkerSettings
from moonpool.protocol.frames import SILENCE_S, Joined, Setup, TurnedAway
from moonpool.protocol.messages import InstanceInfo, InstanceLoad
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId, Role
from moonpool_engine.engine.builtin import open_model, open_tokenizer
from moonpool_engine.engine.runner import make_layout
from moonpool_engine.worker import worker as worker_module
from moonpool_engine.worker.worker import Worker

MODEL = open_model("random:hidden=64,layers=1,heads=2,kv_heads=1,inter=64,vocab=300", "float32")
SECRET = b"a secret of the test"


def make_head(now: Callable[[], float] = time.monotonic) -> ClusterHead:
    card = ModelCard("m", 0, 512, MODEL.spec.vocab_size, MODEL.spec.eos_token_ids)
    tokenizer = open_tokenizer(MODEL.tokenizer, MODEL.spec.vocab_size)
    return ClusterHead(Config(), ApiModel(card, tokenizer), SECRET, now)


def info(incarnation: int) -> InstanceInfo:
    return InstanceInfo(
        instance_id=InstanceId("d"),
        role=Role.DECODE,
        incarnation=incarnation,
        address=PeerAddress(InstanceId("d"), "here", "", "127.0.0.1", 1),
        layout=make_layout(MODEL, 16),
        num_blocks=64,
        cost=FittedCost((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
        pid=1,
        host="here",
    )


class FakeChannel:
    """Records what a link sends and how it ends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.ended: list[str] = []
        self.protocol = 10

    def send(self, *frames: Any) -> None:
        self.sent += frames

    def close(self, reason: str = "") -> None:
        self.ended.append(reason)

    abort = close


def link_of(head: ClusterHead) -> tuple[WorkerLink, FakeChannel]:
    link, channel = WorkerLink(head, SECRET), FakeChannel()
    link.channel = channel  # type: ignore[assignment]
    link.on_open(Identity(instance_id=InstanceId("d"), service="control", fingerprint=b""))
    return link, channel


def test_a_process_that_is_back_before_its_old_connection_ended_is_let_in() -> None:
    head = make_head()
    old, old_channel = link_of(head)
    old.on_frame(Joined(info=info(7)))
    new, new_channel = link_of(head)
    new.on_frame(Joined(info=info(7)))
    assert not any(isinstance(frame, TurnedAway) for frame in new_channel.sent)
    assert old_channel.ended
    old.on_closed("late")  # the end of the old link must not end the new link
    assert list(head.served.conductors[0].instances) == ["d"]
    new.on_frame(InstanceLoad(0, 0, 0, 0, 5, {}, {}))
    assert head.served.conductors[0].instances[InstanceId("d")].load is not None


def test_another_process_of_the_same_name_is_turned_away_and_not_heard() -> None:
    head = make_head()
    first, _ = link_of(head)
    first.on_frame(Joined(info=info(7)))
    twin, twin_channel = link_of(head)
    twin.on_frame(InstanceLoad(0, 0, 0, 0, 5, {}, {}))
    assert head.served.conductors[0].instances[InstanceId("d")].load is None
    twin.on_frame(Joined(info=info(8)))
    assert isinstance(twin_channel.sent[-1], TurnedAway)
    assert head.served.conductors[0].instances[InstanceId("d")].info.incarnation == 7


def test_a_worker_that_says_nothing_is_cut_off_and_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(head_module, "TICK_S", 0.0002)
    silent: list[str] = []

    async def run() -> None:
        nonlocal now_s
        head = make_head(lambda: now_s)
        head.on_silent = silent.append
        link, channel = link_of(head)
        link.on_frame(Joined(info=info(7)))
        ticker = asyncio.create_task(head.tick_forever())
        now_s += 10 * SILENCE_S  # the head itself was stopped for this time
        await asyncio.sleep(0.02)
        for _ in range(int(SILENCE_S - MAX_TURN_S) - 2):
            now_s += 1.0
            await asyncio.sleep(0.01)
        assert not silent and not channel.ended
        for _ in range(3):
            now_s += 1.0
            await asyncio.sleep(0.01)
        ticker.cancel()
        assert set(silent) == {"d"} and "no message for" in channel.ended[0]

    asyncio.run(run())


class Booted:
    """The parts of an instance that are needed to join."""

    def info(self, host: str, pid: int) -> str:
        return "info"


def test_a_head_that_comes_back_while_a_worker_boots_does_not_make_it_boot_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boots: list[Setup] = []
    go_on = threading.Event()

    def boot(setup: Setup, *_: Any) -> Booted:
        boots.append(setup)
        assert go_on.wait(60)
        return Booted()

    def start(self: Worker, booted: Any, setup: Setup) -> None:
        self._booted, self._setup = booted, setup

    monkeypatch.setattr(worker_module, "boot_instance", boot)
    monkeypatch.setattr(worker_module, "Joined", lambda info: info)
    monkeypatch.setattr(Worker, "_start", start)
    setup = make_head().setup()

    async def run() -> None:
        this = Worker(
            WorkerSettings(
                name=InstanceId("d"),
                role=Role.DECODE,
                machine="here",
                host="127.0.0.1",
                secret=SECRET,
                tls=None,
                share=CoreShare(),
            )
        )
        old, new = FakeChannel(), FakeChannel()
        joins = []
        for channel in (old, new):
            this._link.channel = channel  # type: ignore[assignment]
            this.on_frame(setup)
            joins.append(this._joining)
            await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.gather(*(join for join in joins if join is not None))
        assert len(boots) == 1
        assert (old.sent, new.sent) == ([], ["info"])

    uvloop.run(run())
