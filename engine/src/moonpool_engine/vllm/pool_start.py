"""Starts the pool of this host for a vLLM that asks for it, unless there is one.

The pool is a process with a session of its own: it outlives this vLLM, and serves the others of the
host. If several vLLMs start together, only one starts the pool.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.children.start import moonpool_line
from moonpool.host_pool.places import is_served, make_own_folder

log = logging.getLogger("moonpool.vllm_connector")

FLAGS = ("dram", "ssd", "folder", "models", "memory-folder", "host")
"""Flags of `moonpool pool serve` that a vLLM may set for the pool that it starts."""
FOLDERS = ("folder", "memory-folder")
START_S = 60.0
LOOK_S = 0.05


class PoolStartError(Exception):
    """The pool does not start; one line says why."""


def start_in_background(socket_path: Path, settings: Mapping[str, Any]) -> None:
    """Starts the pool while vLLM starts. An error is logged: vLLM serves without the pool, until
    there is one."""

    def start() -> None:
        try:
            process = ensure_pool(socket_path, settings)
        except (PoolStartError, OSError) as error:
            log.error("the KVCache pool was not started: %s", error)
            return
        if process is not None:
            process.wait()  # collects the exit status, so that no entry stays in the process table

    threading.Thread(target=start, name="moonpool-start", daemon=True).start()


def ensure_pool(socket_path: Path, settings: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """Returns the process of a pool that serves at the socket now, None if another one did already.
    `settings`: flags of `moonpool pool serve` without their dashes. Raises PoolStartError or
    OSError."""
    command = command_of(socket_path, settings)
    make_own_folder(socket_path.parent)
    lock = _open(socket_path.with_suffix(".start"), os.O_RDWR)
    try:
        # the lock is released when its process ends, whatever ends it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_served(socket_path):
            log.info("the KVCache pool at %s has been started already", socket_path)
            return None
        return _start(command, socket_path)
    finally:
        os.close(lock)


def command_of(socket_path: Path, settings: Mapping[str, Any]) -> list[str]:
    """Raises PoolStartError for a setting that no pool has."""
    command = moonpool_line("pool", "serve", "--socket", str(socket_path))
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if flag not in FLAGS:
            known = ", ".join(FLAGS)
            raise PoolStartError(f"{name!r} is no setting of a pool; there are {known}")
        text = str(Path(value).absolute()) if flag in FOLDERS else str(value)
        command += [f"--{flag}", text]
    return command


def _start(command: list[str], socket_path: Path) -> subprocess.Popen[bytes]:
    log_path = socket_path.with_suffix(".log")
    output = _open(log_path, os.O_WRONLY | os.O_APPEND)
    try:
        process = subprocess.Popen(  # noqa: S603 - this Python, and flags that are checked above
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(output)
    until_s = time.monotonic() + START_S
    while not is_served(socket_path):
        if process.poll() is not None:
            raise PoolStartError(f"{_last_line(log_path)} ({log_path})")
        if time.monotonic() > until_s:
            raise PoolStartError(f"it does not serve after {START_S:.0f} s: see {log_path}")
        time.sleep(LOOK_S)
    log.info(
        "started the KVCache pool at %s; it outlives this vLLM: end it with `kill %d` (log: %s)",
        socket_path,
        process.pid,
        log_path,
    )
    return process


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _last_line(path: Path) -> str:
    lines = path.read_bytes()[-2000:].decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it ended")
