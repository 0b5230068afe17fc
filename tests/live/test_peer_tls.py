"""Head and workers with certificates give the same answers over encrypted connections; a process
with another certificate cannot join."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moonpool.link.tls import PeerTls, PeerTlsError
from tests.certificates import make_certificates
from tests.live.test_parts import PROMPT, Parts


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.end()


def said(parts: Parts, role: str, name: str, *flags: str) -> str:
    """Starts a worker that cannot join. Returns the last line of its output."""
    head = f"127.0.0.1:{parts.head_port}"
    worker = parts.start("worker", "--role", role, "--head", head, "--name", name, *flags)
    _, words = worker.communicate(timeout=100)
    assert worker.returncode == 1
    assert "Traceback" not in words
    return words.strip().splitlines()[-1]


def answer(client: httpx.Client) -> str:
    found: str = client.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"]
    return found


@pytest.mark.long
def test_parts_with_certificates_serve_and_others_stay_out(parts: Parts, tmp_path: Path) -> None:
    config = tmp_path / "moonpool.toml"
    config.write_text("[network]\nuse_shared_memory = false\n")
    files = {name: make_certificates(tmp_path, "ours", name) for name in ("head", "p", "d")}
    other = make_certificates(tmp_path, "theirs", "d")
    parts.start_head("--config", str(config), *files["head"].flags)
    head = f"127.0.0.1:{parts.head_port}"
    for role, name in (("prefill", "p"), ("decode", "d")):
        line = ["worker", "--role", role, "--head", head, "--name", name]
        parts.start(*line, *files[name].flags)
    client = parts.wait_until_healthy()
    encrypted = answer(client)
    assert "tcp_received_bytes" not in encrypted_blocks(client, "d")
    with socket.create_connection(("127.0.0.1", parts.head_port), timeout=60) as plain:
        plain.sendall(b"\x10\0\0\0" + bytes(16))
        assert plain.recv(1) in (b"", b"\x15"), "only an alert comes back"

    assert "the peer's certificate is not accepted" in said(parts, "decode", "x", *other.flags)
    foreign = [*other.flags[:4], "--cluster-ssl-ca-certs", files["d"].ca_certs]
    assert "does not accept this certificate" in said(parts, "decode", "y", *foreign)
    assert answer(client) == encrypted

    plain_parts = Parts()
    try:
        plain_parts.start_head("--config", str(config))
        plain_parts.start_worker("prefill", "p")
        plain_parts.start_worker("decode", "d")
        assert answer(plain_parts.wait_until_healthy()) == encrypted
        line = said(plain_parts, "decode", "t", *files["d"].flags)
        assert "give --cluster-ssl-certfile to all parts" in line
    finally:
        plain_parts.end()


def encrypted_blocks(client: httpx.Client, name: str) -> dict[str, float]:
    """Waits for the heartbeat that counts bytes over TLS, and returns the counters."""
    while True:
        for one in client.get("/cluster").json()["instances"]:
            found: dict[str, float] = one.get("counters", {})
            if one["instance_id"] == name and found.get("tls_received_bytes"):
                return found


def test_files_that_do_not_fit_end_a_part_with_one_line(parts: Parts, tmp_path: Path) -> None:
    files, other = (make_certificates(tmp_path, "ours", name) for name in ("a", "b"))
    none = str(tmp_path / "none")
    for triple, named in (
        ((none, "", files.ca_certs), f"certfile {none}"),
        ((files.certfile, none, files.ca_certs), f"keyfile {none}"),
        ((files.certfile, other.keyfile, files.ca_certs), other.keyfile),
        ((files.certfile, files.keyfile, none), f"ca-certs {none}"),
        ((files.certfile, files.keyfile, files.keyfile), "ca-certs"),
    ):
        with pytest.raises(PeerTlsError, match=named) as found:
            PeerTls(*triple)
        assert "\n" not in str(found.value)
    flags = ["--cluster-ssl-certfile", none, "--cluster-ssl-ca-certs", files.ca_certs]
    for line in (["head", "--port", "0"], ["worker", "--role", "mixed", "--head", "127.0.0.1:9"]):
        _, words = parts.start(*line, *flags).communicate(timeout=100)
        assert f"cannot read --cluster-ssl-certfile {none}" in words.strip().splitlines()[-1]
    half = parts.start("worker", "--role", "mixed", "--head", "127.0.0.1:9", *flags[:2])
    assert "or neither" in half.communicate(timeout=100)[1]
