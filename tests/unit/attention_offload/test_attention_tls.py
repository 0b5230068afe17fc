"""Tests an attention worker with certificates: the bytes on the wire, and the clients that it
serves."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from moonpool.link.tls import PeerTls
from moonpool.protocol.messages import AttemptId
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BlockId, InstanceId, SamplingParams
from moonpool_engine.attention_offload.client import AttentionClient, AttentionError, connect
from moonpool_engine.attention_offload.partition import WorkerBlockRanges
from moonpool_engine.attention_offload.remote_ops import RemoteOps
from moonpool_engine.attention_offload.service import AttentionService
from moonpool_engine.attention_offload.worker_state import AttentionWorkerState
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import KvCache
from moonpool_engine.engine.runner import Engine, choose_split_ops
from moonpool_engine.transfer.arena import Arena
from tests.certificates import make_certificates
from tests.unit.attention_offload.test_service import ME, NAME, SECRET, options

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture
def tls(tmp_path: Path) -> PeerTls:
    return PeerTls(*make_certificates(tmp_path, "ours", "a"))


@contextmanager
def served(tls: PeerTls | None, use_shm: bool = True) -> Iterator[PeerAddress]:
    name, ops = InstanceId("attention-0"), choose_split_ops()
    state = AttentionWorkerState(name, SECRET, ops, Arena, "127.0.0.1", use_shm, tls)
    made = AttentionService(name, SECRET, state, "127.0.0.1", use_shm, tls)
    try:
        yield made.start()
    finally:
        made.close()


class Wiretap:
    """Runs a relay before a port, which keeps all bytes that pass, of both directions."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self.port = 0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            self.seen += data
            target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class Recorder(RemoteOps):
    """Keeps the rows that it sends and receives, in their form in memory."""

    rows: list[bytes]

    def attend(self, q, args):  # type: ignore[no-untyped-def]
        found = super().attend(q, args)
        self.rows.append(found.contiguous().numpy().tobytes())
        return found


def tokens_of(client: AttentionClient) -> tuple[list[int], list[bytes]]:
    """Returns tokens of a prompt, and the attention's outputs."""
    ops = Recorder(choose_split_ops(), [client.channel], WorkerBlockRanges((6,)))
    ops.rows = []
    layout = options().layout
    cache = torch.empty(1, 1, 1).expand(6, layout.num_layers, layout.slice_elements)
    engine = Engine(open_model(NAME, "float32"), ops, KvCache(cache, layout))
    text, done = list(PROMPT), 0
    for _ in range(8):
        greedy = SamplingParams(temperature=0.0)
        step = StepEntry(AttemptId("r"), text[done:], done, [BlockId(0)], greedy)
        (token,) = engine.step([step]).tokens
        done = len(text)
        text.append(token.token_id)
    return text[len(PROMPT) :], ops.rows


def test_rows_and_commands_of_attention_are_encrypted_between_machines(tls: PeerTls) -> None:
    found = {}
    for name, own in (("plain", None), ("tls", tls)):
        with served(own) as address:
            tap = Wiretap(address.tcp_port)
            tapped = msgspec.structs.replace(address, tcp_port=tap.port)
            client = connect(tapped, ME, SECRET, options(), False, own)
            assert client.channel.transport == ("socket" if own is None else "tls")
            found[name] = tokens_of(client)
            client.close()
            rows = [row for row in found[name][1] if row[:64] in tap.seen]
            if own is None:
                assert ME.encode() in tap.seen and len(rows) == len(found[name][1])
            else:
                assert len(tap.seen) > sum(map(len, found[name][1])), "they did pass here"
                assert ME.encode() not in tap.seen and not rows
    assert found["plain"] == found["tls"]


def test_within_a_host_rings_need_no_certificates(tls: PeerTls) -> None:
    with served(tls) as address:
        client = connect(address, ME, SECRET, options(), True, tls)
        assert client.channel.transport in ("ring", "socket")
        client.close()


def test_a_peer_without_a_certificate_of_the_authority_is_refused(
    tls: PeerTls, tmp_path: Path
) -> None:
    foreign = PeerTls(*make_certificates(tmp_path, "theirs", "b"))
    ours, b = make_certificates(tmp_path, "ours", "c"), make_certificates(tmp_path, "theirs", "d")
    trusting = PeerTls(b.certfile, b.keyfile, ours.ca_certs)
    with served(tls) as address:
        for own, text in (
            (None, "closed the connection|connection broke"),
            (foreign, "the peer's certificate is not accepted"),
            (trusting, "does not accept this certificate|the peer ended it"),
        ):
            with pytest.raises(AttentionError, match=text) as found:
                connect(address, ME, SECRET, options(), False, own)
            assert "\n" not in str(found.value)
        with pytest.raises(AttentionError, match="secret"):
            connect(address, ME, b"another secret altogether", options(), False, tls)
        reset(address.tcp_port)
        with socket.create_connection((address.tcp_host, address.tcp_port)) as plain:
            plain.sendall(b"\0\0\0\x10" + bytes(16))
            plain.settimeout(60)
            assert plain.recv(1) in (b"", b"\x15"), "only an alert comes back"
        client = connect(address, ME, SECRET, options(), False, tls)
        assert tokens_of(client)[0]
        client.close()
    with served(None) as address, pytest.raises(AttentionError):
        connect(address, ME, SECRET, options(), False, tls)


def reset(port: int) -> None:
    """Connects, sends some bytes, and resets the connection before it is accepted."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"x")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_stranger_who_leaves_at_once_ends_no_listener(tls: PeerTls) -> None:
    with served(tls) as address:
        for _ in range(50):
            reset(address.tcp_port)
        time.sleep(0.1)
        client = connect(address, ME, SECRET, options(), False, tls)
        client.close()
