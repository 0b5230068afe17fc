"""A standby's copies of the answers that its head has under way."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field

from moonpool.api.connection.kept_stream import Opening, StreamFacts, written_log
from moonpool.link.packets import anonymous_file
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import AnswerBegun, AnswersCopied

log = limited_logger("moonpool.standby")

ENDED_S = 10.0
"""How long a complete answer is kept: its last bytes may not have reached its client."""
MAX_COPIES = 4096
MAX_COPIED_BYTES = 128 << 20


@dataclass
class _Copy:
    begun: AnswerBegun
    entries: bytearray = field(default_factory=bytearray)  # the bytes of the log after its opening
    ended_s: float | None = None


class AnswerCopies:
    """Follows the logs. `leave` gives them to the next head."""

    def __init__(self) -> None:
        self._copies: OrderedDict[int, _Copy] = OrderedDict()  # oldest first
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._copies)

    def take(self, frame: AnswersCopied, now: float) -> None:
        if frame.is_first:  # the first frame of this connection, which has all answers
            self._copies.clear()
            self._num_bytes = 0
        for begun in frame.begun:
            self._drop(begun.number)
            self._copies[begun.number] = _Copy(begun)
        for number, data in frame.grown:
            copy = self._copies.get(number)
            if copy is not None:
                copy.entries += data
                self._num_bytes += len(data)
        for number in frame.ended:
            copy = self._copies.get(number)
            if copy is not None:
                copy.ended_s = now
        self._make_room(now)

    def leave(self) -> tuple[int, ...]:
        """Returns a file in memory, which the caller owns, for the log of each answer that has
        begun."""
        files = []
        for number, copy in self._copies.items():
            if not copy.entries:
                continue
            try:
                files.append(_written(copy))
            except OSError as error:
                log.warning("answer %d must be computed again: %s", number, error)
        return tuple(files)

    def _make_room(self, now: float) -> None:
        old = [
            number
            for number, copy in self._copies.items()
            if copy.ended_s is not None and now - copy.ended_s > ENDED_S
        ]
        for number in old:
            self._drop(number)
        while len(self._copies) > MAX_COPIES or self._num_bytes > MAX_COPIED_BYTES:
            self._drop(next(iter(self._copies)))

    def _drop(self, number: int) -> None:
        copy = self._copies.pop(number, None)
        if copy is not None:
            self._num_bytes -= len(copy.entries)


def _written(copy: _Copy) -> int:
    begun = copy.begun
    facts = StreamFacts(
        request_id=begun.request_id,
        seed=begun.seed,
        created_s=begun.created_s,
        ids=begun.ids,
        max_model_tokens=begun.max_model_tokens,
        tells_reasoning=True,
    )
    opening = Opening(
        request=b"",
        default_headers=(),
        base=0,
        arrived_s=0.0,
        tenant=begun.tenant,
        is_operator=False,
        facts=facts,
        digest=begun.digest,
        num_returns=begun.num_returns,
    )
    fd = anonymous_file("moonpool call")
    try:
        data = written_log(opening, bytes(copy.entries))
        if os.write(fd, data) != len(data):
            raise OSError("no memory for the log of an answer")
    except OSError:
        os.close(fd)
        raise
    return fd
