"""Tests HTTPS of a real server: answers, refused certificate files, and a certificate that
changes."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from moonpool.api.connection.tls import TlsFiles
from moonpool.http_client.client import HttpClient
from moonpool.http_client.trust import CLIENT_CERT_VARIABLE, TlsError
from moonpool_lab.demo.local_server import ServerError, free_port
from tests.forked.commands import ForkedCommand, run_command
from tests.live.waiting import WAIT_S

OPENSSL = shutil.which("openssl")
MODEL = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=64,vocab=300"
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="no openssl command makes certificates")


def certificate(folder: Path, name: str = "a") -> tuple[str, str]:
    """Makes a self-signed certificate of 127.0.0.1. Returns its file and the file of its key."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    line = f"{OPENSSL} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    line += f" -subj /CN={name} -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    subprocess.run(line.split(), check=True, capture_output=True, timeout=60)
    return cert, key


def served_certificate(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=120)


@pytest.mark.long
def test_a_head_serves_https_and_takes_a_changed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    port = free_port()
    monkeypatch.setenv("MOONPOOL_CLUSTER_SECRET", "ab" * 32)
    line = ["head", MODEL, "--port", str(port)]
    line += ["--head-port", str(free_port()), "--ssl-certfile", cert, "--ssl-keyfile", key]
    with (tmp_path / "log").open("w") as log:
        head = ForkedCommand(line, log.fileno(), log.fileno())
        try:
            context = ssl.create_default_context(cafile=cert)
            with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context) as client:
                answer = _models(client, head)
            assert answer.json()["data"][0]["id"] == MODEL
            with socket.create_connection(("127.0.0.1", port), timeout=120) as plain:
                plain.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b"200" not in plain.recv(100)
            lacking = run_command("profile", "--beliefs-of", f"https://127.0.0.1:{port}")
            assert lacking.returncode == 1 and "CERTIFICATE_VERIFY_FAILED" in lacking.stderr
            trusting = ["--beliefs-of", f"https://127.0.0.1:{port}", "--ca-file", cert]
            assert "the record has no instances" in run_command("profile", *trusting).stderr
            assert asyncio.run(live_status(port, cert)) == 200
            other, other_key = certificate(tmp_path, "b")
            assert served_certificate(port) == Path(cert).read_text()
            shutil.copy(other_key, key)
            shutil.copy(other, cert)
            until_s = time.monotonic() + WAIT_S
            while served_certificate(port) != Path(other).read_text():
                assert time.monotonic() < until_s
                time.sleep(0.1)
        finally:
            head.terminate()
            head.wait(60)
    assert f"at https://127.0.0.1:{port}" in (tmp_path / "log").read_text()


def signed(folder: Path, name: str, authority: tuple[str, str]) -> tuple[str, str]:
    """Makes a certificate of 127.0.0.1 that the authority signs. Returns its file and the file of
    its key."""
    cert, key, request = (str(folder / f"{name}.{kind}") for kind in ("pem", "key", "csr"))
    names = folder / f"{name}.ext"
    names.write_text("subjectAltName=IP:127.0.0.1")
    ask = f"{OPENSSL} req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name}"
    sign = f"{OPENSSL} x509 -req -days 2 -CAcreateserial -CA {authority[0]} -CAkey {authority[1]}"
    for line in (
        f"{ask} -keyout {key} -out {request}",
        f"{sign} -in {request} -extfile {names} -out {cert}",
    ):
        subprocess.run(line.split(), check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.mark.long
def test_only_clients_of_the_authority_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = certificate(tmp_path, "authority")
    stranger = certificate(tmp_path, "stranger")
    cert, key = signed(tmp_path, "server", authority)
    own = signed(tmp_path, "client", authority)
    port, ca = free_port(), authority[0]
    monkeypatch.setenv("MOONPOOL_CLUSTER_SECRET", "ab" * 32)
    line = ["head", MODEL, "--port", str(port), "--head-port", str(free_port())]
    line += ["--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", ca]
    url = f"https://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:
        head = ForkedCommand(line, log.fileno(), log.fileno())
        try:
            context = ssl.create_default_context(cafile=ca)
            context.load_cert_chain(*own)
            with httpx.Client(base_url=url, verify=context) as client:
                assert _models(client, head).json()["data"][0]["id"] == MODEL
            for chain in (None, stranger):
                other = ssl.create_default_context(cafile=ca)
                if chain is not None:
                    other.load_cert_chain(*chain)
                with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                    httpx.get(f"{url}/live", verify=other, timeout=120)
            asked = ("status", url, "--ca-file", ca)
            lacking = run_command(*asked)
            assert lacking.returncode == 1 and len(lacking.stderr.splitlines()) == 1
            both = tmp_path / "both.pem"
            both.write_text(Path(own[0]).read_text() + Path(own[1]).read_text())
            monkeypatch.setenv(CLIENT_CERT_VARIABLE, str(both))
            assert "503" not in run_command(*asked).stderr
            assert asyncio.run(live_status(port, ca)) == 200
            monkeypatch.setenv(CLIENT_CERT_VARIABLE, own[0])
            named = run_command(*asked)
            assert named.returncode == 1 and f"{CLIENT_CERT_VARIABLE}={own[0]}" in named.stderr
        finally:
            head.terminate()
            head.wait(60)


async def live_status(port: int, ca_file: str) -> int:
    """Returns the status that the load generator's client gets."""
    client = HttpClient(f"https://127.0.0.1:{port}", ca_file=ca_file)
    try:
        return (await client.get("/live"))[0]
    finally:
        client.close()


def _models(client: httpx.Client, head: ForkedCommand) -> httpx.Response:
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return client.get("/v1/models")
        except (httpx.ConnectError, httpx.ConnectTimeout):  # tries again until a head answers
            if head.poll() is not None or time.monotonic() > until_s:
                raise ServerError("the head did not start") from None
            time.sleep(0.1)


def test_files_that_do_not_fit_are_named_in_one_line(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path)
    _, other_key = certificate(tmp_path, "b")
    none = str(tmp_path / "none")
    for pair, named in (((none, ""), none), ((cert, none), none), ((cert, other_key), other_key)):
        with pytest.raises(TlsError, match=named) as found:
            TlsFiles(*pair)
        assert "\n" not in str(found.value)
    cert, key = certificate(tmp_path)
    for authority in (none, key):
        with pytest.raises(TlsError, match=f"--ssl-ca-certs {authority}") as found:
            TlsFiles(cert, key, authority)
        assert "\n" not in str(found.value)


def test_a_changed_pair_that_does_not_fit_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = certificate(tmp_path)
    other, _ = certificate(tmp_path, "b")
    files = TlsFiles(cert, key)
    shutil.copy(other, cert)
    files.renew()
    files.renew()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_encrypted_key_asks_no_question(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    locked = str(tmp_path / "locked")
    line = f"{OPENSSL} pkey -in {key} -aes128 -passout pass:abcd -out {locked}"
    subprocess.run(line.split(), check=True, capture_output=True, timeout=60)
    with pytest.raises(TlsError, match="without a passphrase"):
        TlsFiles(cert, locked)
