"""A vLLM may start the pool of its host: one of several vLLMs starts it, and the pool outlives that
vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.host_pool.messages import PROTOCOL, JoinPool, framed
from moonpool.host_pool.places import is_served
from moonpool_engine.vllm.pool_start import PoolStartError, command_of, ensure_pool
from tests.live.test_host_pool import ask
from tests.live.waiting import wait_until

VLLM = """
import logging, sys
from pathlib import Path
from moonpool_engine.vllm.pool_start import ensure_pool
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
found = ensure_pool(Path(sys.argv[1]), {"dram": "16MiB", "memory_folder": sys.argv[2]})
print("PID", found.pid if found else 0, flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moonpool-start-") as found:
        yield Path(found) / "own"


def test_of_two_that_start_together_one_starts_a_pool_that_outlives_both(folder: Path) -> None:
    path = folder / "pool.sock"
    arguments = [sys.executable, "-c", VLLM, str(path), str(folder / "memory")]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    started = [int(text.split("PID ")[1]) for text in said]
    pid = max(started)
    try:
        assert sorted(started) == [0, pid]
        first, second = sorted(said, key=lambda text: "started already" in text)
        assert f"started the KVCache pool at {path}" in first
        assert f"`kill {pid}`" in first
        assert f"the KVCache pool at {path} has been started already" in second
        assert os.getsid(pid) == pid  # the pool leads a session of its own
        pool: Any = SimpleNamespace(socket=path)
        assert b"PoolJoinAccepted" in ask(pool, framed(JoinPool(protocol=PROTOCOL)))
        assert ensure_pool(path, {}) is None
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_served(path))


def test_what_is_wrong_is_one_line(folder: Path) -> None:
    path = folder / "pool.sock"
    with pytest.raises(PoolStartError, match="'memory' is no setting of a pool; there are dram"):
        command_of(path, {"memory": "4G"})
    with pytest.raises(PoolStartError, match="is no size: write 8GiB") as said:
        ensure_pool(path, {"dram": "a lot"})
    assert "\n" not in str(said.value)
    path.parent.chmod(0o777)
    with pytest.raises(OSError, match="others can write in"):
        ensure_pool(path, {})
