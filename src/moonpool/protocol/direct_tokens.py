"""Messages that an instance sends to a front: tokens of answers whose clients wait at the front.

After the handshake (`link.auth`, with a service of its own) only the instance speaks. A front that
is gone ends the connection.
"""

from __future__ import annotations

import msgspec

from moonpool.types import Struct, Token

DIRECT_SERVICE = "tokens"


class DirectWork(Struct, frozen=True, array_like=True):
    """`number`: the front's number of the answer. `attempt`: the number of the answer's attempt,
    from 1 on. `position`: the number of the answer's tokens before these."""

    number: int
    attempt: int
    position: int
    tokens: tuple[Token, ...]


class DirectTokens(Struct, frozen=True, tag=True):
    """The tokens of one step for one front."""

    attempts: tuple[DirectWork, ...] = msgspec.field(name="works")


class NothingSaid(Struct, frozen=True, tag=True):
    """The front sends nothing."""
