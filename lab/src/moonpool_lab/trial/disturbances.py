"""Disturbs a server during a trial as far as its owner allows: resets its cache, or restarts it."""

from __future__ import annotations

import asyncio
import shlex
import time

from moonpool.http_client.client import ConnectionFailedError, HttpClient

RESET_PATHS = ("/reset_prefix_cache", "/flush_cache")
"""Paths of moonpool and vLLM, and of SGLang."""
RESET_S = 30.0
START_S = 600.0


class DisturbanceError(ValueError):
    """A disturbance that was asked for is not possible; the text says what to do."""


async def find_reset_path(client: HttpClient) -> str:
    """Returns the path that resets the cache. To find it, the cache is reset once. Raises
    DisturbanceError."""
    tried = []
    for path in RESET_PATHS:
        status = await _post(client, path)
        if status in (200, 204):
            return path
        tried.append(f"{path}: {status or 'no answer'}")
    raise DisturbanceError(
        f"{client.url} resets no cache ({', '.join(tried)}): leave --may-reset-cache out, or"
        " start it with this route (vLLM: VLLM_SERVER_DEV_MODE=1)"
    )


async def reset_cache(client: HttpClient, path: str) -> bool:
    """Resets the server's cache. Returns whether that has succeeded."""
    return await _post(client, path) in (200, 204)


async def _post(client: HttpClient, path: str) -> int:
    try:
        async with asyncio.timeout(RESET_S), client.stream("POST", path) as response:
            return response.status
    except (TimeoutError, ConnectionFailedError):
        return 0


def parse_command(text: str) -> list[str]:
    """Splits a restart command into words; no shell reads it. Raises DisturbanceError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise DisturbanceError(f"--restart-command {text!r} cannot be split: {error}") from None
    if not words:
        raise DisturbanceError("--restart-command is empty: name a program")
    return words


async def restart(client: HttpClient, command: list[str]) -> float:
    """Runs the command and waits until the server answers. Returns the seconds until the server
    answers.

    Raises DisturbanceError if the command fails or no server answers in time.
    """
    started_s = time.monotonic()
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise DisturbanceError(f"--restart-command {command[0]}: {error.strerror}") from None
    try:
        async with asyncio.timeout(START_S):
            status = await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise DisturbanceError(f"--restart-command did not end within {START_S:g} s") from None
    if status:
        raise DisturbanceError(f"--restart-command ended with status {status}")
    while not await _is_up(client):
        if time.monotonic() - started_s > START_S:
            raise DisturbanceError(f"no server answers {START_S:g} s after --restart-command")
        await asyncio.sleep(0.2)
    return time.monotonic() - started_s


async def _is_up(client: HttpClient) -> bool:
    try:
        async with asyncio.timeout(5):
            status, _ = await client.get("/v1/models")
    except (TimeoutError, ConnectionFailedError):
        return False
    return status == 200
