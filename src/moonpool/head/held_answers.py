"""Holds everything that must outlive a process that answers calls: the sockets and logs of answers
under way, and connections without a call."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping, Sequence

from moonpool.head.watch.culprits import Culprits
from moonpool.link.packets import PacketSocket
from moonpool.protocol.supervision import (
    AdoptDetachedStream,
    AdoptStream,
    AllStreamsSent,
    DetachedStreamOpened,
    FromHead,
    HeadsEnded,
    HeldState,
    NoteWork,
    PassConnection,
    StreamClosed,
    StreamDetached,
    StreamOpened,
    TakeConnection,
    ToHead,
)


class HeldAnswers:
    """The held answers, by the numbers that the process gives. `HeldAnswers` owns the file
    descriptors."""

    def __init__(
        self, cut_answers: Mapping[int, int] | None = None, state: HeldState | None = None
    ) -> None:
        """`cut_answers`: answers of a lost head on another machine, whose connections were cut.
        `state`: what an earlier program of this process has left."""
        state = HeldState() if state is None else state
        self.culprits = Culprits(state.ended)
        # maps the number of an answer to its socket and its log
        self._answers = dict(state.answers)
        self._cut_answers = dict(state.cut_answers if cut_answers is None else cut_answers)
        # connections of clients that have no call under way
        self._connections = list(state.connections)
        self._next_number = max(state.next_number, len(self._cut_answers))

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[int]:
        """Yields the numbers of all answers."""
        yield from self._answers
        yield from self._cut_answers

    def take(self, packet: FromHead, fds: Sequence[int]) -> bool:
        """Handles a message about what is held. Returns False for any other message."""
        match packet:
            case StreamOpened():
                self._answers[packet.number] = (fds[0], fds[1])
                self._next_number = packet.number + 1
            case DetachedStreamOpened():
                self._cut_answers[packet.number] = fds[0]
                self._next_number = packet.number + 1
            case StreamDetached():
                self._cut(packet.number)
            case NoteWork():
                self.culprits.watch(fds[0])
            case HeadsEnded():
                self.culprits.alike.append(packet)
            case StreamClosed():
                self.culprits.forget(packet.number)
                for fd in self._answers.pop(packet.number, ()):
                    os.close(fd)
                if packet.number in self._cut_answers:
                    os.close(self._cut_answers.pop(packet.number))
            case PassConnection():
                self._connections.append(fds[0])
            case _:
                return False
        return True

    def bequeath(self, packets: PacketSocket[FromHead, ToHead]) -> None:
        """Gives everything to the next process. The supervisor continues to hold the answers, but
        not the connections without a call."""
        for fd in self._connections:
            packets.send(TakeConnection(), (fd,))
            os.close(fd)
        self._connections.clear()
        self._let_go()
        for number, fds in self._answers.items():
            num_ended, num_killed = self.culprits.of(number)
            take = AdoptStream(number=number, num_ended=num_ended, num_killed=num_killed)
            packets.send(take, fds)
        for number, fd in self._cut_answers.items():
            num_ended, _ = self.culprits.of(number)
            packets.send(AdoptDetachedStream(number=number, num_ended=num_ended), (fd,))
        packets.send(AllStreamsSent(next_number=self._next_number))

    def leave(self) -> HeldState:
        """Returns what the next program of this process needs."""
        return HeldState(
            answers=self._answers,
            cut_answers=self._cut_answers,
            ended=self.culprits.ended,
            connections=tuple(self._connections),
            next_number=self._next_number,
        )

    def close(self) -> None:
        for fds in [*self._answers.values(), self._cut_answers.values(), self._connections]:
            for fd in fds:
                os.close(fd)
        self._answers.clear()
        self._cut_answers.clear()
        self._connections.clear()

    def _let_go(self) -> None:
        """Closes connections whose clients have left."""
        poller, numbers = select.poll(), {}
        for number, (client, _) in self._answers.items():
            poller.register(client, select.POLLRDHUP)
            numbers[client] = number
        for client, _ in poller.poll(0):
            self._cut(numbers[client])

    def _cut(self, number: int) -> None:
        """Notes that the connection of an answer has ended, so that only its log is held."""
        if number in self._answers:
            client, self._cut_answers[number] = self._answers.pop(number)
            os.close(client)
