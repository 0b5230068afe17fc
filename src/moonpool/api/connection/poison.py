"""Calls that have ended processes: none may end more than two, regardless of who sends it again."""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from collections.abc import Callable

from moonpool.api.errors import NO_RETRY, ApiError

MAX_ENDED = 2
"""Heads that one call may end, and instances."""
INSTANCES_ENDED = "instances_ended"
"""The reason of a refusal because of instances. Calls like it are refused at once."""
REMEMBERED_S = 600.0
MAX_REMEMBERED = 256


def poison_error() -> ApiError:
    """Client libraries do not send it again, as they would after other errors of this status."""
    text = (
        f"This request, or one like it, has ended processes of the server {MAX_ENDED} times, so it"
        " is not tried again. Tell the server's operator: its log names the request."
    )
    return ApiError(text, status=500, code="head_failed", headers=(NO_RETRY,))


def late_error() -> ApiError:
    text = "the request's deadline passed while the server's head process was replaced"
    return ApiError(text, status=504, code="deadline")


def send_error(sock: socket.socket, error: ApiError, payload: bytes, request_id: str = "") -> None:
    """Sends the error to a client that got nothing yet, and closes the connection."""
    fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(payload))]
    fields += [*error.headers, (b"connection", b"close")]
    if request_id:
        fields.append((b"x-request-id", request_id.encode()))
    head = b"".join(b"%b: %b\r\n" % field for field in fields)
    status = b"HTTP/1.1 %d %b\r\n" % (error.status, _WORDS[error.status])
    try:
        sock.send(status + head + b"\r\n" + payload)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # its client has gone
    sock.close()


_WORDS = {500: b"Internal Server Error", 504: b"Gateway Timeout"}


class Enders:
    """How many processes calls have ended, by tenant and by the digest of path and body."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counts: OrderedDict[tuple[str, bytes], tuple[int, float]] = OrderedDict()

    def note(self, tenant: str, digest: bytes, count: int, since_s: float) -> None:
        """The oldest is forgotten if there are too many."""
        self._counts[tenant, digest] = count, since_s
        self._counts.move_to_end((tenant, digest))
        if len(self._counts) > MAX_REMEMBERED:
            self._counts.popitem(last=False)

    def count(self, tenant: str, digest: bytes) -> int:
        """Processes that such calls have ended within the last minutes."""
        count, since_s = self._counts.get((tenant, digest), (0, 0.0))
        return count if self._now() - since_s < REMEMBERED_S else 0
