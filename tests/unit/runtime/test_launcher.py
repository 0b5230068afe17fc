"""Tests worker processes that do not start, or that start while the cluster ends."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from typing import Any

import pytest
import uvloop

from moonpool.api.connection.listening import listen
from moonpool.config.parse import parse_config
from moonpool.config.tables import ClusterConfig, Config
from moonpool.cores import CoreShare
from moonpool.head import keeper as keeper_module
from moonpool.head import launcher as launcher_module
from moonpool.head.launcher import LocalLauncher
from moonpool.head.supervisor import Supervisor
from moonpool.protocol.supervision import HeadPrepared
from moonpool.retry_delays import RetryDelays
from moonpool.types import Role
from moonpool_lab.demo.local_server import is_alive

SLEEPER = (sys.executable, "-c", "import time; time.sleep(60)")
PAIR = Config(cluster=ClusterConfig(prefill=1, decode=1))


def make_launcher() -> LocalLauncher:
    return LocalLauncher(Config(cluster=ClusterConfig(prefill=1, decode=0)), 1, b"secret", 1)


@pytest.mark.parametrize("dies", [False, True])
def test_workers_that_cannot_be_kept_up_end_the_start(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def spawn(*_: Any) -> asyncio.subprocess.Process:
        if dies:
            return await asyncio.create_subprocess_exec("false")
        raise OSError("no more processes")

    monkeypatch.setattr(keeper_module, "MAX_RESTARTS", 0)
    monkeypatch.setattr(LocalLauncher, "spawn", spawn)

    async def run() -> None:
        config = parse_config("", {"cluster": {"prefill": 1, "decode": 0, "mixed": 1}})
        with listen("127.0.0.1", 0) as http, listen("127.0.0.1", 0) as control:
            supervisor = Supervisor(config, b"secret", True, http, control, None)
            supervisor._start_workers(HeadPrepared(cores=(), threads=1))
            async with asyncio.timeout(60):
                while not supervisor._fatal:
                    await asyncio.sleep(0.01)
            assert ("ended too often" if dies else "no more processes") in supervisor._fatal
            await supervisor._end()

    uvloop.run(run())


def test_a_worker_that_comes_up_while_the_cluster_ends_is_ended_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher_module, "STOP_S", 0.2)
    spawned: list[int] = []

    async def run() -> None:
        async def spawn(*_: Any) -> asyncio.subprocess.Process:
            if not spawned:
                spawned.append(0)
                return await asyncio.create_subprocess_exec(*SLEEPER)
            await asyncio.sleep(0.1)  # makes the fork of the process slow
            process = await asyncio.create_subprocess_exec(*SLEEPER)
            spawned.append(process.pid)
            return process

        monkeypatch.setattr(LocalLauncher, "spawn", spawn)
        launcher = LocalLauncher(PAIR, 1, b"secret", 1)
        launcher.start()
        await asyncio.sleep(0.05)
        await launcher.stop()
        await asyncio.sleep(0.1)
        assert not any(map(is_alive, spawned[1:]))

    uvloop.run(run())


class InDevice:
    """A process that cannot be killed, because it is in a device call that does not return."""

    pid, returncode, was_killed = 4242, None, False

    async def wait(self) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    def kill(self) -> None:
        self.was_killed = True


def test_a_worker_that_cannot_be_killed_does_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher_module, "STOP_S", 0.1)
    monkeypatch.setattr(launcher_module, "KILLED_S", 0.1)
    process = InDevice()

    async def spawn(*_: Any) -> InDevice:
        return process

    async def run() -> None:
        monkeypatch.setattr(LocalLauncher, "spawn", spawn)
        launcher = make_launcher()
        launcher.start()
        await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            await launcher.stop()

    uvloop.run(run())
    assert process.was_killed and "process 4242 was killed and does not end" in caplog.text


def test_a_worker_is_told_its_cores_each_time_it_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawned: list[tuple[str, ...]] = []

    async def spawn(*words: str, **_: Any) -> None:
        spawned.append(words)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    shares = [CoreShare((0, 1), (4,)), CoreShare((2, 3), (4,))]

    async def run() -> None:
        launcher = LocalLauncher(PAIR, 1, b"secret", 2, shares)
        for role, name in ((Role.DECODE, "decode-0"), (Role.PREFILL, "prefill-0")) * 2:
            await launcher.spawn(role, name)
        await make_launcher().spawn(Role.PREFILL, "prefill-0")

    uvloop.run(run())
    told = [words[words.index("--cores") + 1 :][:3] for words in spawned if "--cores" in words]
    assert told == [("2,3", "--other-cores", "4"), ("0,1", "--other-cores", "4")] * 2
    assert len(spawned) == 5


def test_a_worker_that_stands_still_is_killed_and_started_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes: list[asyncio.subprocess.Process] = []

    async def spawn(*_: Any) -> asyncio.subprocess.Process:
        processes.append(await asyncio.create_subprocess_exec(*SLEEPER))
        return processes[-1]

    async def run() -> None:
        monkeypatch.setattr(LocalLauncher, "spawn", spawn)
        launcher = make_launcher()
        launcher.start()
        while not processes:
            await asyncio.sleep(0.01)
        processes[0].send_signal(signal.SIGSTOP)
        launcher.kill("prefill-0")
        launcher.kill("a stranger")
        await asyncio.wait_for(processes[0].wait(), 60)
        async with asyncio.timeout(60):
            while len(processes) < 2:
                await asyncio.sleep(0.01)
        await launcher.stop()

    monkeypatch.setattr(launcher_module, "STOP_S", 0.1)
    uvloop.run(run())
    assert len(processes) == 2 and processes[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("serving_steady_s", "delays"), [(0.1, ["0", "0", "0"]), (600.0, ["0", "0.02", "0.04"])]
)
def test_a_worker_that_served_well_is_started_again_without_a_delay(
    serving_steady_s: float,
    delays: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def spawn(*_: Any) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec("sh", "-c", "sleep 0.15; exit 1")

    monkeypatch.setattr(keeper_module, "RESTARTS", RetryDelays((0.0, 0.02, 0.04)))
    monkeypatch.setattr(keeper_module, "SERVING_STEADY_S", serving_steady_s)
    monkeypatch.setattr(LocalLauncher, "spawn", spawn)

    def waited() -> list[str]:
        return re.findall(r"the next one starts in ([0-9.]+) s", caplog.text)

    async def run() -> None:
        launcher = make_launcher()
        launcher.note_started()
        launcher.start()
        async with asyncio.timeout(60):
            while len(waited()) < len(delays):
                await asyncio.sleep(0.01)
        await launcher.stop()

    uvloop.run(run())
    assert waited()[: len(delays)] == delays
