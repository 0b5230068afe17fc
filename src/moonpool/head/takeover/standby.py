"""A standby: follows the head of a cluster from another machine, and replaces it when it is gone.

The standby has what the head's own supervisor has: the settings, the instances to wait for and
copies of the answers under way. The connections of these answers end with the lost head, and their
clients come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from dataclasses import dataclass, field

import msgspec

from moonpool.api.access.protection import open_peer_tls
from moonpool.config.tables import Config
from moonpool.head.cluster_error import ClusterError
from moonpool.head.takeover.answer_copies import AnswerCopies
from moonpool.link.head_link import HeadGoneError, HeadLink, WorkerError
from moonpool.link.tls import PeerTlsError
from moonpool.protocol.frames import AnswersCopied, ApplyStandby, HeadAddress, Setup, WorkFrame
from moonpool.protocol.known_heads import KnownHeads
from moonpool.protocol.model_offer import ModelOffer
from moonpool.types import InstanceId, Role

log = logging.getLogger("moonpool.standby")

TAKE_OVER_S = 5.0
"""How long the head must be out of reach before the standby takes over. The head's own supervisor
starts another head sooner than this."""
BEAT_S = 1.0
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104, nothing binds to them here


@dataclass(frozen=True)
class Takeover:
    """The state that a lost head leaves to the next one. `epoch` is the epoch of the next head.
    `answers`: the logs of the answers under way, as files in memory, which the next supervisor
    owns."""

    config: Config
    epoch: int
    instances: dict[InstanceId, Role]
    answers: tuple[int, ...] = ()
    offers: dict[InstanceId, ModelOffer] = field(default_factory=dict)


class Standby:
    """Must be made on the running loop. `wait` ends when this machine must run the head."""

    def __init__(self, config: Config, secret: bytes, control: socket.socket) -> None:
        """`control`: bound to where workers will find the next head. Raises ClusterError."""
        self._config = config
        self._secret = secret
        self._control = control
        self._epoch = 0  # the epoch of the head that this standby has become, or 0
        self._setup: Setup | None = None
        self._link: HeadLink | None = None
        self._answers = AnswerCopies()
        try:
            self._tls = open_peer_tls(config)
        except PeerTlsError as error:
            raise ClusterError(str(error)) from None

    async def wait(self, host: str, port: int) -> Takeover | None:
        """Follows the head until it is gone. Returns None if the head was stopped in order. Raises
        ClusterError."""
        link = self._link = self._new_link(TAKE_OVER_S)
        link.on_answers = self._on_answers
        beat = asyncio.create_task(self._beat(link))
        try:
            await link.run(host, port)
            log.info("the head was stopped: its standby ends")
            return None
        except HeadGoneError as error:
            if link.leadership is None or self._setup is None:
                raise ClusterError(f"there is no head to stand by for: {error}") from None
            log.error("%s; taking over", error)
            self._epoch = link.heads.epoch + 1
            settings = settings_of(self._setup, self._config)
            told, answers = link.leadership, self._answers.leave()
            return Takeover(settings, self._epoch, told.instances, answers, told.offers)
        except WorkerError as error:
            raise ClusterError(str(error)) from None
        finally:
            beat.cancel()

    async def replace(self, host: str, port: int) -> None:
        """Tells the lost head that it was replaced, if it ever comes back. Never ends."""
        while True:
            link = self._link = self._new_link(0.0)
            with contextlib.suppress(WorkerError):
                await link.run(host, port)
            await asyncio.sleep(BEAT_S)

    def _new_link(self, patience_s: float) -> HeadLink:
        name = InstanceId(f"standby-{socket.gethostname()}-{os.getpid()}")
        heads = KnownHeads(is_fixed=True)
        return HeadLink(name, self._secret, self, self._tls, heads, patience_s)

    async def _beat(self, link: HeadLink) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if link.channel is not None:
                self.on_head()

    def _on_answers(self, frame: AnswersCopied) -> None:
        self._answers.take(frame, time.monotonic())

    # Methods by which it follows the link

    def on_head(self) -> None:
        assert self._link is not None
        host, port = self._control.getsockname()[:2]
        if host in WILDCARDS:
            host = self._link.local_host
        address = HeadAddress(host=host, port=port)
        wants = not self._epoch  # with an epoch, this standby has already replaced the head
        self._link.send(
            ApplyStandby(address=address, pid=os.getpid(), epoch=self._epoch, wants_answers=wants)
        )

    def on_frame(self, frame: WorkFrame) -> None:
        if isinstance(frame, Setup) and self._setup is None:
            log.info("standing by")
            self._setup = frame

    def on_lost(self) -> None:
        """Does nothing, because the link tries again."""


def settings_of(setup: Setup, own: Config) -> Config:
    """Returns this machine's configuration with what the lost head shared with its workers."""
    network = msgspec.structs.replace(
        setup.network, head_host=own.network.head_host, head_port=own.network.head_port
    )
    return msgspec.structs.replace(
        own,
        model=setup.model,
        pool=setup.pool,
        mooncake=setup.mooncake,
        network=network,
        engine=setup.engine,
        slo=setup.slo,
        attention=setup.sharing,
        conductor=msgspec.structs.replace(own.conductor, learning=setup.learning),
    )
