"""Sends tokens from an instance directly to the fronts whose clients wait for them.

The head gets these tokens a few times a second, with several steps in one report. The head gets at
once the tokens that it needs for decisions: the first token of an attempt, and the last ones. If a
front cannot be reached, its tokens go by the head.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import fsum

import msgspec

from moonpool.link.auth import ClientHandshake, Identity
from moonpool.link.channel import Channel
from moonpool.link.tls import HANDSHAKE_S, PeerTls
from moonpool.protocol.direct_tokens import DIRECT_SERVICE, DirectTokens, DirectWork, NothingSaid
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    AttemptTokens,
    BlocksChanged,
    Command,
    InstanceLoad,
    Report,
    ReserveDecode,
    StartPrefill,
    StepTokens,
    TokenRoute,
)
from moonpool.types import InstanceId, Token

log = logging.getLogger("moonpool.worker")

REPORT_S = 0.25
"""How far the head may be behind."""
RETRY_S = 5.0
"""Seconds between tries to reach a front."""
CONNECT_S = 3.0

FrontChannelOut = Channel[NothingSaid, DirectTokens]


class _FrontConnection:
    """The connection to one front, from the first attempt that the front waits for."""

    def __init__(self, name: InstanceId, secret: bytes, tls: PeerTls | None) -> None:
        self.num_attempts = 0
        self._me = Identity(instance_id=name, service=DIRECT_SERVICE, fingerprint=b"")
        self._secret = secret
        self._tls = tls
        self._channel: FrontChannelOut | None = None
        self._opening: asyncio.Task[None] | None = None
        self._tried_s = float("-inf")
        self.pending: list[DirectWork] = []

    @property
    def is_open(self) -> bool:
        return self._channel is not None and self._channel.protocol > 0

    def begin(self, host: str, port: int) -> None:
        """Connects, unless a connection is being made or has just failed."""
        now = time.monotonic()
        if self._channel is None and now - self._tried_s > RETRY_S:
            self._tried_s = now
            handshake = ClientHandshake(self._secret, self._me)
            decoder = msgspec.msgpack.Decoder(NothingSaid)
            self._channel = Channel(handshake, decoder, self)
            self._opening = asyncio.create_task(self._open(self._channel, host, port))

    def flush(self) -> None:
        if self.pending and self._channel is not None:
            self._channel.send(DirectTokens(attempts=tuple(self.pending)))
        self.pending.clear()

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._channel is not None:
            self._channel.close()

    async def _open(self, channel: FrontChannelOut, host: str, port: int) -> None:
        tls = self._tls
        try:
            async with asyncio.timeout(CONNECT_S if tls is None else CONNECT_S + HANDSHAKE_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: channel,
                    host,
                    port,
                    ssl=None if tls is None else tls.client,
                    server_hostname=None if tls is None else "",
                    ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
                )
        except OSError as error:
            self._channel = None
            where = f"{host}:{port}"
            log.warning(
                "no connection to the front at %s (%s): tokens go by the head", where, error
            )

    # Methods by which it listens to the channel

    def on_connected(self) -> None:
        pass

    def on_open(self, peer: Identity) -> None:
        pass

    def on_frame(self, frame: NothingSaid) -> None:
        pass

    def on_closed(self, reason: str) -> None:
        self._channel = None


@dataclass(slots=True)
class _RoutedAttempt:
    route: TokenRoute
    connection: _FrontConnection
    position: int  # position of the next token in the answer
    # tokens that were sent to the front, but not yet reported to the head
    tokens: list[Token] = field(default_factory=list)
    reported: bool = False
    last_s: float = 0.0
    longest_gap_s: float = 0.0


class TokenRoutes:
    """The token routes of one instance. `send`: sends messages to the head."""

    def __init__(
        self,
        name: InstanceId,
        secret: bytes,
        tls: PeerTls | None,
        host: Callable[[], str],
        send: Callable[[Iterable[Report]], None],
    ) -> None:
        """`host`: the head's host, where the fronts run."""
        self._name = name
        self._secret = secret
        self._tls = tls
        self._host = host
        self._send = send
        self._fronts: dict[str, _FrontConnection] = {}
        self._attempts: dict[AttemptId, _RoutedAttempt] = {}
        self._unreported: dict[AttemptId, _RoutedAttempt] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._gaps_s: list[float] = []  # gaps of steps that are not reported yet

    def note(self, command: Command) -> None:
        """Notes that the head has sent a command."""
        match command:
            case StartPrefill() if command.target is None and command.attempt.route is not None:
                self._add(command, command.attempt.route, 0)
            case ReserveDecode() if command.attempt.route is not None:
                self._add(command, command.attempt.route, 1)  # the head delivers the first token
            case Abort():
                self._forget(command.attempt_id)

    def report(self, reports: Iterable[Report]) -> None:
        """Sends tokens to their fronts, and reports to the head what it must know now."""
        if not self._attempts:
            self._send(reports)
            return
        urgent: list[Report] = []
        for report in reports:
            if isinstance(report, StepTokens):
                urgent += self._take(report)
            else:
                if self._unreported and not isinstance(report, BlocksChanged | InstanceLoad):
                    urgent += self._collected()
                urgent.append(report)
                if isinstance(report, AttemptFailed):
                    self._forget(report.attempt_id)
        for connection in self._fronts.values():
            connection.flush()
        if urgent:
            self._send(urgent)

    def reset(self) -> None:
        """Forgets all attempts, because the head is gone."""
        self._attempts.clear()
        self._unreported.clear()
        for connection in self._fronts.values():
            connection.close()
        self._fronts.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _add(self, command: StartPrefill | ReserveDecode, route: TokenRoute, first: int) -> None:
        work = command.attempt
        connection = self._fronts.get(route.front)
        if connection is None:
            connection = _FrontConnection(self._name, self._secret, self._tls)
            self._fronts[route.front] = connection
        connection.begin(self._host(), route.port)
        connection.num_attempts += 1
        position = len(work.token_ids) - work.num_prompt_tokens + first
        self._attempts[work.attempt_id] = _RoutedAttempt(route, connection, position)

    def _forget(self, attempt_id: AttemptId) -> None:
        routed = self._attempts.pop(attempt_id, None)
        self._unreported.pop(attempt_id, None)
        if routed is None:
            return
        routed.connection.num_attempts -= 1
        if not routed.connection.num_attempts:
            for name, connection in list(self._fronts.items()):
                if connection is routed.connection and not connection.is_open:
                    connection.close()  # the connection of a front that has ended
                    del self._fronts[name]

    def _take(self, report: StepTokens) -> list[Report]:
        """Returns the items that the head must deliver now, complete, and with the tokens of their
        attempts that were not reported before."""
        now = time.monotonic()
        by_head: list[AttemptTokens] = []
        for item in report.attempts:
            routed = self._attempts.get(item.attempt_id)
            if routed is None:
                by_head.append(item)
                continue
            if routed.last_s:
                routed.longest_gap_s = max(routed.longest_gap_s, now - routed.last_s)
            routed.last_s = now
            if item.finish is not None or not routed.connection.is_open:
                by_head.append(self._joined(routed, item))
                if item.finish is not None:
                    self._forget(item.attempt_id)
                continue
            work = DirectWork(
                routed.route.number, routed.route.attempt, routed.position, item.tokens
            )
            routed.connection.pending.append(work)
            routed.position += len(item.tokens)
            routed.tokens += item.tokens
            if routed.reported:
                self._unreported[item.attempt_id] = routed
            else:  # this is the first token of the attempt
                by_head.append(self._unheard(item.attempt_id, routed))
        if self._unreported:
            self._gaps_s.append(report.gap_s)
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(REPORT_S, self._report_late)
        else:
            self._gaps_s.clear()
        if not by_head:
            return []
        is_whole = len(by_head) == len(report.attempts) and not any(i.num_direct for i in by_head)
        return [StepTokens(attempts=tuple(by_head), gap_s=report.gap_s if is_whole else 0.0)]

    def _joined(self, routed: _RoutedAttempt, item: AttemptTokens) -> AttemptTokens:
        """Returns the item with the tokens before it that were not reported to the head."""
        sent, routed.tokens = routed.tokens, []
        self._unreported.pop(item.attempt_id, None)
        routed.position += len(item.tokens)
        routed.reported = True
        if not sent:
            return item
        return AttemptTokens(
            item.attempt_id,
            (*_bare(sent), *item.tokens),
            item.finish,
            len(sent),
            self._longest(routed),
        )

    def _unheard(self, attempt_id: AttemptId, routed: _RoutedAttempt) -> AttemptTokens:
        """Returns the tokens of an attempt that were not reported to the head."""
        sent, routed.tokens = routed.tokens, []
        routed.reported = True
        longest_s = self._longest(routed)
        return AttemptTokens(attempt_id, _bare(sent), None, len(sent), longest_s)

    def _collected(self) -> list[Report]:
        """Returns all tokens that were not reported to the head."""
        unreported, self._unreported = self._unreported, {}
        gaps_s, self._gaps_s = self._gaps_s, []
        works = [self._unheard(name, routed) for name, routed in unreported.items()]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not works:
            return []
        gap_s = 0.0
        if all(gaps_s) and all(len(work.tokens) == len(gaps_s) for work in works):
            # the steps have the same decodes, so they are reported as repeated steps
            gap_s = fsum(gaps_s) / len(gaps_s)
        return [StepTokens(attempts=tuple(works), gap_s=gap_s)]

    def _longest(self, routed: _RoutedAttempt) -> float:
        found, routed.longest_gap_s = routed.longest_gap_s, 0.0
        return found

    def _report_late(self) -> None:
        self._timer = None
        reports = self._collected()
        if reports:
            self._send(reports)


def _bare(tokens: Iterable[Token]) -> tuple[Token, ...]:
    """Returns only the ids of the tokens, because the front has the other data."""
    return tuple([Token(token.token_id) for token in tokens])
