"""The process in which the Mooncake Store's client runs: asked over socket pairs, one to a thread.

It stands apart because its client may wait for minutes for a master that is gone, and its C++ may
end the process that it runs in; neither must happen to an instance. It sees the staging memory
only, never the arena, and ends with the process that started it. It reads nothing but its
sockets, and imports next to nothing else of moonpool.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import threading
from typing import Any, Literal

import msgspec

from moonpool.messenger.parent import end_with
from moonpool.types import Struct

MAX_MESSAGE_BYTES = 128 << 10
_BUFFER_BYTES = 16 << 20  # of the client's own, which moves of registered memory do not use


class Start(Struct, frozen=True):
    """Its first and only argument. The first socket is told `Ready`."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    protocol: str
    device_name: str
    master_server_address: str
    sockets: tuple[int, ...]
    staging: int
    staging_bytes: int
    parent: int


class Ready(Struct, frozen=True):
    error: str = ""


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`offsets` are places in the staging memory, of `sizes` bytes. Answered by one number for each
    name: exist, 1 if it is there; get, the bytes that arrived; else 0. Below 0: an error."""

    what: Literal["exist", "put", "get", "remove"]
    names: list[str]
    offsets: list[int]
    sizes: list[int]


def main() -> None:
    start = msgspec.json.decode(sys.argv[1], type=Start)
    end_with(start.parent)
    lanes = [socket.socket(fileno=fd) for fd in start.sockets]
    staging = mmap.mmap(start.staging, start.staging_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(staging))
    try:
        client = _connect(start, address)
    except Exception as error:  # whatever it is, the parent shall say it
        lanes[0].send(msgspec.json.encode(Ready(error=f"{error}"[:1000])))
        os._exit(1)
    lanes[0].send(msgspec.json.encode(Ready()))
    for lane in lanes[1:]:
        threading.Thread(target=_serve, args=(lane, client, address), daemon=True).start()
    _serve(lanes[0], client, address)


def _connect(start: Start, address: int) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise RuntimeError(
            f"Mooncake's client cannot be imported ({error}): pip install 'moonpool[mooncake]',"
            " and see docs/dependencies.md"
        ) from None
    client = MooncakeDistributedStore()
    code = client.setup(
        start.local_hostname,
        start.metadata_server,
        start.global_segment_size,
        _BUFFER_BYTES,
        start.protocol,
        start.device_name,
        start.master_server_address,
    )
    if not code:
        code = client.register_buffer(address, start.staging_bytes)
    if code:
        raise RuntimeError(f"the Mooncake Store at {start.master_server_address} answers {code}")
    return client


def _serve(lane: socket.socket, client: Any, address: int) -> None:
    decoder = msgspec.msgpack.Decoder(Ask)
    while message := lane.recv(MAX_MESSAGE_BYTES):
        codes = _perform(client, decoder.decode(message), address)
        lane.send(msgspec.msgpack.encode(codes))
    os._exit(0)  # its threads do not end by themselves


def _perform(client: Any, ask: Ask, address: int) -> list[int]:
    places = [address + offset for offset in ask.offsets]
    if ask.what == "exist":
        return list(client.batch_is_exist(ask.names))
    if ask.what == "put":
        return list(client.batch_put_from(ask.names, places, ask.sizes))
    if ask.what == "get":
        return list(client.batch_get_into(ask.names, places, ask.sizes))
    return [int(client.remove(name, True)) for name in ask.names]


if __name__ == "__main__":
    main()
