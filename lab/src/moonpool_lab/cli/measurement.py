"""Runs a measurement for a command: the servers end with the measurement, and an error is one
line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import httpx

from moonpool.cli.output import check_folders, fail, origin, write_json
from moonpool.config.tables import ConfigError
from moonpool.http_client.client import ConnectionFailedError
from moonpool.trace.row import TraceError
from moonpool_lab.demo.local_server import ServerError
from moonpool_lab.profiling.live_profile import ProfileError
from moonpool_lab.replay.player import UnservableError
from moonpool_lab.replay.server import ServerUnfitError


def run_measurement(run: Callable[[], dict[str, Any]], json_file: str | None) -> dict[str, Any]:
    """Runs a measurement, writes its figures with their origin, and returns the figures.

    Ends the command with one line for an error that a user can mend.
    """
    check_folders(json_file)
    # SIGTERM raises an exception, so that the servers that the command started end with it.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        found = run()
    except (
        ProfileError,
        ServerError,
        ConfigError,
        TraceError,
        ConnectionFailedError,
        UnservableError,
        ServerUnfitError,
        httpx.HTTPError,
    ) as error:
        fail(str(error))
    finally:
        signal.signal(signal.SIGTERM, before)
    write_json(json_file, found | {"origin": origin()})
    return found
