"""Frames of a cluster's live page, read from its server-sent events (`api/page/live_page.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from moonpool.cli.server.address import NO_KEY, Server
from moonpool.server_events import ServerEventReader

_TIMEOUT_S = 30.0

Frame = dict[str, Any]


class NoFramesError(Exception):
    """The server sends no frames; one line says why. `is_final`: whether trying again cannot
    help."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


def time_text(seconds: float) -> str:
    """Returns "2.66 s", or "256 ms" below a second."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"


def frames(server: Server) -> Iterator[Frame]:
    """Yields the frames of one connection until the server ends it. Raises NoFramesError."""
    import httpx

    from moonpool.http_client.trust import TlsError

    url = server.url
    try:
        with (
            server.open_client(_TIMEOUT_S) as client,
            client.stream("GET", f"{url}/cluster/events") as events,
        ):
            if events.status_code in (401, 403, 503):
                message = str(json.loads(events.read())["error"]["message"])
                has_no_key = events.status_code == 401
                is_final = events.status_code != 503
                raise NoFramesError(NO_KEY if has_no_key else message, is_final=is_final)
            events.raise_for_status()
            reader = ServerEventReader()
            for part in events.iter_bytes():
                for data in reader.feed(part):
                    if data != b"{}":
                        yield _checked(json.loads(data))
    except httpx.HTTPStatusError as error:
        text = f"{url} is no moonpool server ({error.response.status_code}): correct the URL"
        raise NoFramesError(text, is_final=True) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise NoFramesError(f"{url} is no URL: {error}", is_final=True) from None
    except httpx.HTTPError as error:
        raise NoFramesError(server.unreachable(error), is_final=False) from None
    except TlsError as error:
        raise NoFramesError(str(error), is_final=True) from None
    except (ValueError, KeyError, TypeError) as error:
        text = f"{url} is no moonpool server: {error}; correct the URL"
        raise NoFramesError(text, is_final=True) from None


def first_frame(server: Server) -> Frame:
    """Raises NoFramesError."""
    for frame in frames(server):
        return frame
    raise NoFramesError(f"the server at {server.url} is stopping", is_final=False)


def _checked(frame: Any) -> Frame:
    if not isinstance(frame, dict) or "totals" not in frame:
        raise ValueError("its events are of another kind")
    return frame
