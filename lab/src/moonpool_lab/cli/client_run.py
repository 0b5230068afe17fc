"""Runs the part of a command that calls a live server, and prints an error as one line."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import uvloop

from moonpool.cli.output import fail
from moonpool.http_client.client import ConnectionFailedError
from moonpool_lab.replay.player import UnservableError
from moonpool_lab.replay.server import ServerUnfitError


def run_client(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of `work`. Ends the command for an error that a user can mend, and with
    status 130 after Ctrl-C."""
    try:
        return uvloop.run(work)
    except (ConnectionFailedError, ServerUnfitError, UnservableError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
