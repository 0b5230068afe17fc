"""The head's side of its standbys: which standbys there are, and what they and the workers are
told."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from moonpool.api.connection.kept_answers import KeptAnswers
from moonpool.config.tables import Config
from moonpool.head.takeover.answer_feed import AnswerFeed
from moonpool.head.worker_link import WorkerLink
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import (
    SILENCE_S,
    AnswersCopied,
    ApplyStandby,
    HeadAddress,
    Leadership,
    Setup,
    TurnedAway,
)
from moonpool.protocol.model_offer import ModelOffer
from moonpool.protocol.versions import KNOWS_STANDBYS
from moonpool.types import InstanceId, Role

log = limited_logger("moonpool.head")

BEAT_S = 1.0


class StandbyLinks:
    """`epoch` is that of this head; `replaced` is set once a head of a later epoch is known."""

    def __init__(self) -> None:
        self.epoch = 1
        self.replaced = False
        self._told_s = 0.0
        self._links: dict[WorkerLink, ApplyStandby] = {}
        self._feeds: dict[WorkerLink, AnswerFeed] = {}
        self.answers = KeptAnswers()
        """Answers under way, and those whose clients may come back. A standby has copies of these
        answers."""

    def note(self, link: WorkerLink, apply: ApplyStandby, workers: Iterable[WorkerLink]) -> bool:
        """Returns True if the standby is accepted, and new. If the standby has replaced this head,
        the workers are sent to it."""
        if apply.epoch <= self.epoch:
            if self._links and link not in self._links:
                message = "the cluster has a standby already, and two could take over at a time"
                link.channel.send(TurnedAway(message=message))
                link.channel.close(message)
            elif link not in self._links:
                log.info("a standby is there: %s:%d", apply.address.host, apply.address.port)
                self._links[link] = apply
                if apply.wants_answers:
                    self._feeds[link] = AnswerFeed(self.answers, link.channel)
                return True
            return False
        if not self.replaced:
            log.error(
                "the head at %s:%d (epoch %d) has replaced this one (epoch %d): restart this one"
                " with --standby-of",
                apply.address.host,
                apply.address.port,
                apply.epoch,
                self.epoch,
            )
        self.replaced = True
        frame = Leadership(epoch=apply.epoch, standbys=(apply.address,), replaced=True)
        for worker in workers:
            if worker is not link and _understands(worker):
                worker.channel.send(frame)
        return False

    def announce_to(self, link: WorkerLink) -> None:
        """Tells a worker that asks to join which head this is."""
        if _understands(link):
            link.channel.send(Leadership(epoch=self.epoch, standbys=self._addresses()))

    @property
    def next_due_s(self) -> float:
        """Returns the longest time until this head must announce itself again."""
        return BEAT_S / 2 if self._links else float("inf")

    def are_due(self, listened_s: float) -> bool:
        """Whether it is time to announce this head again. Standbys that are silent are dropped."""
        if not self._links or listened_s - self._told_s < BEAT_S / 2:
            return False
        self._told_s = listened_s
        for link in list(self._links):
            if listened_s - link.heard_s > SILENCE_S:
                link.channel.abort(f"no message for {SILENCE_S:g} s")
        return True

    def announce_leadership(
        self,
        links: Collection[WorkerLink],
        expected: dict[InstanceId, Role],
        offers: dict[InstanceId, ModelOffer],
    ) -> None:
        """Shows all links that this head is alive."""
        if self.replaced:
            return
        addresses = self._addresses()
        for link in links:
            if _understands(link):
                frame = Leadership(epoch=self.epoch, standbys=addresses)
                if link in self._links:
                    own = {"instances": dict(expected), "offers": dict(offers)}
                    frame = msgspec.structs.replace(frame, **own)
                link.channel.send(frame)

    def drop(self, link: WorkerLink) -> bool:
        """Returns whether the link was that of a standby."""
        feed = self._feeds.pop(link, None)
        if feed is not None:
            feed.end()
        return self._links.pop(link, None) is not None

    @property
    def wants_copies(self) -> bool:
        """Whether a standby follows answers, including those of fronts."""
        return any(feed.has_begun for feed in self._feeds.values())

    def copy(self, frame: AnswersCopied) -> None:
        """Sends the new bytes of a front's answers."""
        for link in self._feeds:
            link.channel.send(frame)

    def describe(self, listened_s: float) -> list[dict[str, Any]]:
        return [
            {
                "name": link.instance_id,
                "host": apply.address.host,
                "port": apply.address.port,
                "pid": apply.pid,
                "heard_s_ago": round(max(listened_s - link.heard_s, 0.0), 3),
            }
            for link, apply in self._links.items()
        ]

    def _addresses(self) -> tuple[HeadAddress, ...]:
        return tuple(apply.address for apply in self._links.values())


def _understands(link: WorkerLink) -> bool:
    return link.channel.protocol >= KNOWS_STANDBYS


def setup_of(config: Config) -> Setup:
    """Returns the settings that all instances of a cluster share."""
    cluster = config.cluster
    return Setup(
        model=config.model,
        pool=config.pool,
        mooncake=config.mooncake,
        network=config.network,
        engine=config.engine,
        slo=config.slo,
        learning=config.conductor.learning,
        num_instances=max(cluster.num_workers, 1),
        num_processes=cluster.num_processes(config.engine),
        sharing=config.attention,
    )
