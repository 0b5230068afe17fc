"""Puts and gets objects at a Mooncake Store and a Redis, under the peers' own Python.

    PEER_PYTHON pools_peer.py          answers requests, one JSON object per line, until the end of
                                       its input; its first line lists the available peers
    PEER_PYTHON pools_peer.py MASTER   provides the memory of the Mooncake Store

The process imports nothing of moonpool. Mooncake needs the package
`mooncake-transfer-engine-non-cuda` (and libibverbs1), Redis the packages `redis` and `hiredis` and
a `redis-server` on PATH. Both pools serve over TCP on the loopback interface, from separate
processes.
"""

import ctypes
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import time

SEGMENT_BYTES = 1 << 30
BUFFER_BYTES = 64 << 20
START_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Buffer:
    """Memory that was touched in advance, with a separate part for each object."""

    def __init__(self) -> None:
        self.mapping = mmap.mmap(-1, BUFFER_BYTES)
        self.mapping[:] = os.urandom(1 << 16) * (BUFFER_BYTES >> 16)
        self.view = memoryview(self.mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))

    def start(self, number: int, size: int) -> int:
        return number * size % BUFFER_BYTES

    def part(self, number: int, size: int) -> memoryview:
        start = self.start(number, size)
        return self.view[start : start + size]


class Redis:
    def __init__(self, buffer: Buffer) -> None:
        import redis  # type: ignore[import-not-found]

        port = free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1"]
        self.process = subprocess.Popen(  # noqa: S603 - fixed arguments
            [*command, "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        self.client = redis.Redis(port=port)
        self.buffer = buffer
        by_s = time.monotonic() + START_S
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > by_s:
                    raise
                time.sleep(0.05)

    def put(self, names: "list[tuple[str, int]]", size: int) -> None:
        views = {name: self.buffer.part(number, size) for name, number in names}
        if len(views) == 1:
            self.client.set(*views.popitem())
        else:
            self.client.mset(views)

    def get(self, names: "list[tuple[str, int]]", size: int) -> None:
        found = self.client.mget([name for name, _ in names])
        for (_, number), value in zip(names, found):  # noqa: B905 - other Pythons than ours
            self.buffer.part(number, size)[:] = value

    def remove(self, key: str) -> None:
        self.client.delete(key)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)


class Mooncake:
    def __init__(self, buffer: Buffer) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.processes: list[subprocess.Popen[str]] = []
        master = f"127.0.0.1:{free_port()}"
        beside = os.path.join(os.path.dirname(sys.executable), "mooncake_master")
        self._start(
            beside,
            f"--rpc_port={master.partition(':')[2]}",
            f"--metrics_port={free_port()}",
            "--rpc_address=127.0.0.1",
        )
        self._await_port(int(master.partition(":")[2]))
        holder = self._start(sys.executable, __file__, master)
        assert holder.stdout is not None
        said = holder.stdout.readline().strip()
        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", master
        ) or self.store.register_buffer(buffer.address, BUFFER_BYTES)
        if said != "holding 0" or code:
            raise RuntimeError(f"the Mooncake Store did not start: {said!r}, {code}")
        self.buffer = buffer

    def _start(self, *command: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(  # noqa: S603 - fixed arguments
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if __file__ in command else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.processes.append(process)
        return process

    def _await_port(self, port: int) -> None:
        by_s = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return
            except OSError:
                if time.monotonic() > by_s:
                    raise
                time.sleep(0.05)

    def put(self, names: "list[tuple[str, int]]", size: int) -> None:
        """Stores slices of `size` bytes under their names. Raises RuntimeError if the store refuses
        a slice."""
        keys, places = self._places(names, size)
        if len(keys) == 1:
            codes = [self.store.put_from(keys[0], places[0], size)]
        else:
            codes = self.store.batch_put_from(keys, places, [size] * len(keys))
        if any(codes):
            raise RuntimeError(f"to put {size} bytes gave {codes}")

    def get(self, names: "list[tuple[str, int]]", size: int) -> None:
        """Reads slices of `size` bytes. Raises RuntimeError if a slice is absent or has another
        size."""
        keys, places = self._places(names, size)
        if len(keys) == 1:
            found = [self.store.get_into(keys[0], places[0], size)]
        else:
            found = self.store.batch_get_into(keys, places, [size] * len(keys))
        if found != [size] * len(keys):
            raise RuntimeError(f"to get {size} bytes gave {found}")

    def _places(self, names: "list[tuple[str, int]]", size: int) -> "tuple[list[str], list[int]]":
        starts = [self.buffer.start(number, size) for _, number in names]
        return [name for name, _ in names], [self.buffer.address + start for start in starts]

    def remove(self, key: str) -> None:
        self.store.remove(key)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait(10)


def hold(master: str) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", master)
    print("holding", code, flush=True)
    sys.stdin.read()
    os._exit(0)


def start_all(buffer: Buffer) -> "tuple[dict[str, Redis | Mooncake], dict[str, str]]":
    """Starts the peers. Returns the peers that run, and for each other peer why it is absent. A
    peer that cannot start raises no error."""
    peers: dict[str, Redis | Mooncake] = {}
    absent = {}
    for name, kind in (("mooncake", Mooncake), ("redis", Redis)):
        try:
            if name == "redis" and shutil.which("redis-server") is None:
                raise RuntimeError("there is no redis-server on PATH")
            peers[name] = kind(buffer)
        except Exception as error:
            absent[name] = f"{type(error).__name__}: {error}"
    return peers, absent


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The output of libraries goes to stderr, because stdout has the answers.
    peers, absent = start_all(Buffer())
    print(json.dumps({"peers": list(peers), "absent": absent}), file=answers, flush=True)
    stored: set[tuple[str, int, int]] = set()
    for line in sys.stdin:
        asked = json.loads(line)
        peer, size, count = peers[asked["peer"]], asked["size"], asked["count"]
        if asked["what"] == "get":
            for number in range(count):
                if (asked["peer"], size, number) not in stored:
                    peer.put([(f"kept {size} {number}", number)], size)
                    stored.add((asked["peer"], size, number))
        run, name = (peer.put, "put") if asked["what"] == "put" else (peer.get, "kept")
        numbered = [(f"{name} {size} {number}", number) for number in range(count)]
        many = asked["many"]
        requests = [numbered[start : start + many] for start in range(0, count, many)]
        began_s = time.perf_counter()
        for request in requests:
            run(request, size)
        spent_s = time.perf_counter() - began_s
        if asked["what"] == "put":
            for number in range(count):
                peer.remove(f"put {size} {number}")
        print(json.dumps({"seconds": spent_s}), file=answers, flush=True)
    for peer in peers.values():
        peer.close()
    os._exit(0)  # An ordinary exit would wait for Mooncake's threads, which never end.


if __name__ == "__main__":
    if len(sys.argv) > 1:
        hold(sys.argv[1])
    else:
        main()
