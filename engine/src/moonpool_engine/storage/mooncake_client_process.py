"""The process in which the Mooncake Store's client runs. The process serves requests over socket
pairs, one per thread.

The process is separate from the instance because the client may wait for minutes for a lost master,
and its C++ code may end its process. The process maps only the staging memory, never the arena, and
ends with the process that started it. The process reads only its sockets and imports little of
moonpool.
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

from moonpool.children.parent import end_with
from moonpool.installation import install_command
from moonpool.types import Struct

MAX_MESSAGE_BYTES = 128 << 10
# size of the client's own buffer, which calls on registered memory do not use
_BUFFER_BYTES = 16 << 20


class MooncakeSetup(Struct, frozen=True):
    """The process's only argument. The process replies with MooncakeReady on the first socket."""

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


class MooncakeReady(Struct, frozen=True):
    """The process is ready, or `error` says why it failed."""

    error: str = ""


class StoreRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call of the Mooncake client. `offsets` and `sizes` are in bytes of the staging memory.
    The reply is one code per name: for exist 1 if the object exists, for get the bytes read, else
    0. A negative code is an error."""

    what: Literal["exist", "put", "get", "remove"]
    names: list[str]
    offsets: list[int]
    sizes: list[int]


def main() -> None:
    """Runs the process."""
    setup = msgspec.json.decode(sys.argv[1], type=MooncakeSetup)
    end_with(setup.parent)
    channels = [socket.socket(fileno=fd) for fd in setup.sockets]
    staging = mmap.mmap(setup.staging, setup.staging_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(staging))
    try:
        client = _connect(setup, address)
    except Exception as error:  # the parent process reports any error
        channels[0].send(msgspec.json.encode(MooncakeReady(error=f"{error}"[:1000])))
        os._exit(1)
    channels[0].send(msgspec.json.encode(MooncakeReady()))
    for channel in channels[1:]:
        threading.Thread(target=_serve, args=(channel, client, address), daemon=True).start()
    _serve(channels[0], client, address)


def _connect(setup: MooncakeSetup, address: int) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise RuntimeError(
            f"Mooncake's client cannot be imported ({error}); docs/dependencies.md says what it"
            f" needs; it is installed by: {install_command('mooncake')}"
        ) from None
    client = MooncakeDistributedStore()
    code = client.setup(
        setup.local_hostname,
        setup.metadata_server,
        setup.global_segment_size,
        _BUFFER_BYTES,
        setup.protocol,
        setup.device_name,
        setup.master_server_address,
    )
    if not code:
        code = client.register_buffer(address, setup.staging_bytes)
    if code:
        raise RuntimeError(f"the Mooncake Store at {setup.master_server_address} answers {code}")
    return client


def _serve(channel: socket.socket, client: Any, address: int) -> None:
    decoder = msgspec.msgpack.Decoder(StoreRequest)
    while message := channel.recv(MAX_MESSAGE_BYTES):
        codes = _perform(client, decoder.decode(message), address)
        channel.send(msgspec.msgpack.encode(codes))
    os._exit(0)  # the client's threads would not end otherwise


def _perform(client: Any, request: StoreRequest, address: int) -> list[int]:
    addresses = [address + offset for offset in request.offsets]
    if request.what == "exist":
        return list(client.batch_is_exist(request.names))
    if request.what == "put":
        return list(client.batch_put_from(request.names, addresses, request.sizes))
    if request.what == "get":
        return list(client.batch_get_into(request.names, addresses, request.sizes))
    return [int(client.remove(name, True)) for name in request.names]


if __name__ == "__main__":
    main()
