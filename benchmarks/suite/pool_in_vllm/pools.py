"""The pools that are compared: their processes, and the settings with which a vLLM uses them.

A pool's processes are killed and started again with the same ports and the same folder, so the
blocks that it finds afterwards are those that it has kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

import moonpool
import moonpool_engine
from benchmarks.suite.live.vllm_server import vllm_environment
from moonpool.types import Struct
from moonpool_lab.demo.local_server import ServerError, free_port

PoolName = Literal["none", "offload", "offload-host", "lmcache", "mooncake", "moonpool"]
POOL_NAMES: tuple[PoolName, ...] = get_args(PoolName)
WORDS: dict[PoolName, str] = {
    "none": "no pool",
    "offload": "vLLM's offloading",
    "offload-host": "vLLM's offloading, copies by this benchmark",
    "lmcache": "LMCache",
    "mooncake": "Mooncake Store",
    "moonpool": "moonpool",
}
START_S = 120.0
END_S = 10.0
MOONCAKE_BUFFER_BYTES = 256 << 20
MOONCAKE_BUCKET_KEYS = 16
"""Blocks of one file. Mooncake writes only full files. With its default of 500, the last hundreds
of blocks would never be on disk."""
LOOPBACK = "127.0.0.1"


class PoolPlace(Struct, frozen=True):
    """The resources that a pool may use. `folder` is empty when a fleet first starts."""

    python: str
    folder: Path
    dram_bytes: int
    block_tokens: int

    @property
    def dram_gib(self) -> float:
        return self.dram_bytes / (1 << 30)


class Pool:
    """The base class, which has no pool. The classes of pools override the differences."""

    def __init__(self, place: PoolPlace) -> None:
        self.place = place
        self._running: list[subprocess.Popen[bytes]] = []

    def connector(self) -> dict[str, Any] | None:
        """vLLM's --kv-transfer-config."""
        return None

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of each vLLM."""
        return {}

    def commands(self) -> Sequence[Sequence[str]]:
        """Command lines of its processes, in the order of their start."""
        return ()

    def own_environment(self) -> Mapping[str, str]:
        """Returns the environment variables of the pool's own processes."""
        return vllm_environment(self.place.python)

    def is_ready(self, number: int) -> bool:
        """Whether the process of this number serves."""
        return True

    def start(self) -> None:
        """Raises ServerError."""
        for number, command in enumerate(self.commands()):
            log = self._log(number).open("ab")
            with log:
                self._running.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=dict(self.own_environment()),
                        start_new_session=True,
                    )
                )
            self._wait(number)

    @property
    def pids(self) -> list[int]:
        """Ids of its running processes."""
        return [process.pid for process in self._running]

    def kill(self) -> None:
        """Sends SIGKILL to all processes, children too."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Stops the processes in order, so that shared memory is freed."""
        self._signal(signal.SIGTERM)

    def _signal(self, sign: signal.Signals) -> None:
        for process in reversed(self._running):
            _signal_group(process.pid, sign)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
        self._running.clear()

    def _wait(self, number: int) -> None:
        until_s = time.monotonic() + START_S
        while not self.is_ready(number):
            if self._running[number].poll() is not None:
                raise ServerError(f"the pool's process ended: {self._last_words(number)}")
            if time.monotonic() > until_s:
                raise ServerError(f"the pool is not up after {START_S:g} s")
            time.sleep(0.1)

    def _log(self, number: int) -> Path:
        return self.place.folder / f"process-{number}.log"

    def _last_words(self, number: int) -> str:
        lines = self._log(number).read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "its log is empty"


class VllmOffload(Pool):
    """vLLM's own offloading, unchanged: each of the two vLLMs has half of the DRAM for itself."""

    extra: Mapping[str, Any] = {}

    def connector(self) -> dict[str, Any]:
        extra = {"cpu_bytes_to_use": self.place.dram_bytes // 2, **self.extra}
        return _connector("OffloadingConnector", extra)


class VllmHostOffload(VllmOffload):
    """Like the class above, with copies that need no GPU."""

    extra: Mapping[str, Any] = {
        "spec_name": "HostCopySpec",
        "spec_module_path": "vllm_offload_spec",
    }

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(Path(__file__).parent)}


class LmCache(Pool):
    """LMCache's multiprocess server, which vLLM's `--kv-offloading-backend lmcache` uses: DRAM, and
    files behind it."""

    def __init__(self, place: PoolPlace) -> None:
        super().__init__(place)
        self._port, self._http, self._metrics = free_port(), free_port(), free_port()

    def connector(self) -> dict[str, Any]:
        at = {"lmcache.mp.host": f"tcp://{LOOPBACK}", "lmcache.mp.port": self._port}
        return _connector("LMCacheMPConnector", at)

    def environment(self) -> dict[str, str]:
        return {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}

    def own_environment(self) -> Mapping[str, str]:
        return {**super().own_environment(), **self.environment()}

    def commands(self) -> Sequence[Sequence[str]]:
        files = {"type": "fs", "base_path": str(self.place.folder / "files")}
        return (
            (
                _beside(self.place.python, "lmcache", "install lmcache==0.5.6 beside vLLM"),
                *("server", "--host", LOOPBACK, "--port", str(self._port)),
                *("--http-host", LOOPBACK, "--http-port", str(self._http)),
                *("--prometheus-port", str(self._metrics), "--disable-observability"),
                *("--l1-size-gb", f"{self.place.dram_gib:g}", "--eviction-policy", "LRU"),
                *("--chunk-size", str(self.place.block_tokens)),
                *("--supported-transfer-mode", "auto"),
                *("--l2-adapter", msgspec.json.encode(files).decode()),
            ),
        )

    def is_ready(self, number: int) -> bool:
        return listens(self._port) and listens(self._http)


class MooncakePool(Pool):
    """A Mooncake master, and a separate store process, whose DRAM and files survive the end of a
    vLLM."""

    def __init__(self, place: PoolPlace) -> None:
        super().__init__(place)
        self._master, self._metrics, self._store = free_port(), free_port(), free_port()

    def connector(self) -> dict[str, Any]:
        return _connector("MooncakeStoreConnector", {})

    def environment(self) -> dict[str, str]:
        told = {
            "mode": "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"{LOOPBACK}:{self._master}",
            "protocol": "tcp",
            "global_segment_size": 0,
            "local_buffer_size": MOONCAKE_BUFFER_BYTES,
            "enable_offload": True,
        }
        file = self.place.folder / "mooncake.json"
        file.write_bytes(msgspec.json.encode(told))
        return {"MOONCAKE_CONFIG_PATH": str(file)}

    def own_environment(self) -> Mapping[str, str]:
        files = self.place.folder / "files"
        files.mkdir(exist_ok=True)
        return {
            **super().own_environment(),
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(files),
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(MOONCAKE_BUCKET_KEYS),
        }

    def commands(self) -> Sequence[Sequence[str]]:
        advice = "install mooncake-transfer-engine-non-cuda beside vLLM"
        master = (
            _beside(self.place.python, "mooncake_master", advice),
            *(f"--rpc_address={LOOPBACK}", f"--rpc_port={self._master}"),
            *(f"--metrics_port={self._metrics}", "--enable_offload=true"),
        )
        store = (
            _beside(self.place.python, "mooncake_client", advice),
            *(f"--host={LOOPBACK}", f"--port={self._store}", "--protocol=tcp"),
            *(f"--master_server_address={LOOPBACK}:{self._master}", "--enable_offload=true"),
            *("--metadata_server=P2PHANDSHAKE", f"--global_segment_size={self.place.dram_bytes}"),
        )
        return master, store

    def is_ready(self, number: int) -> bool:
        return listens(self._store if number else self._master)


SSD = "8GiB"


class MoonpoolPool(Pool):
    """`moonpool pool serve` from this checkout, from which the vLLMs also load the connector."""

    @property
    def socket_path(self) -> Path:
        return self.place.folder / "pool.sock"

    @property
    def _memory(self) -> Path:
        return Path("/dev/shm") / f"moonpool-bench-{os.getpid()}"

    def connector(self) -> dict[str, Any]:
        config = _connector("MoonpoolConnector", {"pool": str(self.socket_path)})
        return config | {"kv_connector_module_path": "moonpool.vllm_connector"}

    def environment(self) -> dict[str, str]:
        """Makes both packages importable as if they were installed: their sources, and the engine's
        entry points."""
        packages = (moonpool, moonpool_engine)
        named = self.place.folder / "entry-points" / "moonpool_engine-0.dist-info"
        named.mkdir(parents=True, exist_ok=True)
        text = distribution("moonpool-engine").read_text("entry_points.txt") or ""
        (named / "entry_points.txt").write_text(text)
        paths = [str(Path(p.__path__[0]).parent) for p in packages]
        return {"PYTHONPATH": ":".join([*paths, str(named.parent)])}

    def own_environment(self) -> Mapping[str, str]:
        return os.environ

    def commands(self) -> Sequence[Sequence[str]]:
        return (
            (
                *(sys.executable, "-m", "moonpool", "pool", "serve"),
                *("--socket", str(self.socket_path)),
                *("--dram", f"{self.place.dram_gib:g}GiB", "--ssd", SSD),
                *("--folder", str(self.place.folder / "files")),
                *("--memory-folder", str(self._memory)),
            ),
        )

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self._memory, ignore_errors=True)

    def is_ready(self, number: int) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket_path)) == 0


POOLS: dict[PoolName, Callable[[PoolPlace], Pool]] = {
    "none": Pool,
    "offload": VllmOffload,
    "offload-host": VllmHostOffload,
    "lmcache": LmCache,
    "mooncake": MooncakePool,
    "moonpool": MoonpoolPool,
}


def _connector(name: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)}


def _beside(python: str, name: str, advice: str) -> str:
    command = Path(python).with_name(name)
    if not command.exists():
        raise ServerError(f"there is no {command}: {advice}")
    return str(command)


def listens(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def _signal_group(pid: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, sign)
