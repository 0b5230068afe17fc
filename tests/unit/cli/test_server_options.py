"""Tests that every command that asks a server has the same flag for its address, and sends the key
over https."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import click
import pytest
from test_options import COMMANDS

from moonpool.cli.output import without_keys
from moonpool.cli.server.address import KEYS_FOR_ANYBODY, OWN_KEYS, full_url, is_address
from tests.cli_runner import invoke
from tests.http_server import QuietHandler

ROOT = Path(__file__).parents[3]
OPENSSL = shutil.which("openssl")
TRACE = '{"timestamp": 0, "input_length": 9, "output_length": 2}\n' * 3
WORDS: dict[str, list[str]] = {
    "status": [],
    "top": ["--once"],
    "upgrade": [],
    "rewind": [],
    "trial": [],
    "replay": ["--trace", "t.jsonl"],
    "forecast": ["--trace", "t.jsonl"],
    "profile": [],
    "profile --beliefs": ["--beliefs"],
    "pool stat": [],
    "pool audit": [],
    "pool ls": [],
    "pool drain": ["decode-0"],
    "bench capacity": [],
}
NEEDS_MORE = {"bench peers-live"}
"""Commands that start servers of their own before they send a request."""


class TlsServer(NamedTuple):
    address: str
    ca_file: str
    seen: list[tuple[str, str]]
    """Holds path and key of each request."""


def certificate(folder: Path) -> tuple[str, str, str]:
    """Makes an authority's certificate, and certificate and key of 127.0.0.1 that the authority
    signed."""
    ca, ca_key, cert, key, request, names = (
        str(folder / name) for name in ("ca.pem", "ca.key", "s.pem", "s.key", "s.csr", "names")
    )
    Path(names).write_text("subjectAltName=IP:127.0.0.1")
    sign = f"{OPENSSL} x509 -req -days 2 -CAcreateserial -CA {ca} -CAkey {ca_key}"
    make = f"{OPENSSL} req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for line in (
        f"{make} -x509 -days 2 -subj /CN=authority -keyout {ca_key} -out {ca}",
        f"{make} -subj /CN=server -keyout {key} -out {request}",
        f"{sign} -in {request} -extfile {names} -out {cert}",
    ):
        subprocess.run(line.split(), check=True, capture_output=True, timeout=60)
    return ca, cert, key


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    """Runs an https server of a private authority, which refuses every key."""
    if OPENSSL is None:
        pytest.skip("no openssl command makes certificates")
    ca, cert, key = certificate(tmp_path_factory.mktemp("certificates"))
    seen: list[tuple[str, str]] = []

    class Refusing(QuietHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("authorization", "")))
            self.answer(b'{"error": {"message": "this key is refused"}}', 401)

        do_POST = do_GET

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # clients that do not trust the authority break off

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with Quiet(("127.0.0.1", 0), Refusing) as made:
        made.socket = context.wrap_socket(made.socket, server_side=True)
        Thread(target=made.serve_forever, daemon=True).start()
        yield TlsServer(f"127.0.0.1:{made.server_port}", ca, seen)
        made.shutdown()


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in OWN_KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text(TRACE)


def params_of(command: click.Command) -> dict[str, click.Parameter]:
    return {flag: param for param in command.params for flag in param.opts}


def asking() -> dict[str, click.Command]:
    return {
        name.removeprefix("moonpool "): command
        for name, command in COMMANDS.items()
        if "--ca-file" in params_of(command)
    }


def test_each_command_that_asks_a_server_takes_the_same_options() -> None:
    found = asking()
    assert found.keys() == {name.partition(" --")[0] for name in WORDS} | NEEDS_MORE
    texts = set()
    for name, command in found.items():
        params = params_of(command)
        key, ca = params["--api-key"], params["--ca-file"]
        assert isinstance(key, click.Option) and isinstance(ca, click.Option)
        texts.add((key.help, ca.help, ca.default, ca.hidden or key.hidden))
        address = [p for p in command.params if isinstance(p, click.Argument)]
        assert any("URL" in (argument.metavar or "") for argument in address), name
        for flag in ("--url", "--peer-url"):
            assert flag not in params or getattr(params[flag], "hidden", False), name
    variables = [", ".join(keys) for keys in (OWN_KEYS, KEYS_FOR_ANYBODY)]
    assert len(texts) == len(variables)


def test_no_other_command_makes_connections_of_its_own() -> None:
    """No command may open a connection itself, which would lack the key or the authority."""
    client = re.compile(r"httpx\.(?:\w*Client|get|post|stream|request)\(|HttpClient\(")
    cli_folder = ROOT / "src" / "moonpool" / "cli"
    makers = {
        str(path.relative_to(cli_folder))
        for path in cli_folder.rglob("*.py")
        if client.search(path.read_text())
    }
    # The only other connection asks the Hub about a model, and the Hub is not a moonpool server.
    assert makers == {"server/address.py", "default_model.py"}


def asked(name: str, url: str, *more: str) -> tuple[int, str]:
    command = name.partition(" --")[0].split()
    before = WORDS[name] if name == "pool drain" else []
    after = [] if before else WORDS[name]
    result = invoke(*command, *before, url, *after, *more)
    return result.exit_code, result.stderr


@pytest.mark.parametrize("name", WORDS)
def test_the_key_goes_to_a_server_of_the_given_authority_only(
    name: str, tls_server: TlsServer
) -> None:
    url = f"https://{tls_server.address}"
    tls_server.seen.clear()
    status, error = asked(name, url, "--api-key", "sk-given")
    assert status == 1 and not tls_server.seen
    assert "CERTIFICATE_VERIFY_FAILED" in error and "--ca-file" in error
    assert error.count("\n") == 1
    status, error = asked(name, url, "--api-key", "sk-given", "--ca-file", tls_server.ca_file)
    assert status == 1 and error.count("\n") == 1
    assert "key" in error and "--api-key" in error
    assert {key for _, key in tls_server.seen} == {"Bearer sk-given"}


@pytest.mark.parametrize("name", WORDS)
def test_the_key_of_the_environment_is_sent(
    name: str, tls_server: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-all")
    tls_server.seen.clear()
    asked(name, f"https://{tls_server.address}/", "--ca-file", tls_server.ca_file)
    assert {key for _, key in tls_server.seen} == {"Bearer sk-of-all"}
    assert not any("//" in path for path, _ in tls_server.seen)


@pytest.mark.parametrize("name", WORDS)
def test_a_file_without_certificates_is_named(name: str, tls_server: TlsServer) -> None:
    url = f"https://{tls_server.address}"
    status, error = asked(name, url, "--ca-file", "t.jsonl")
    assert status == 1 and "cannot use --ca-file t.jsonl" in error


@pytest.mark.parametrize("name", WORDS)
def test_host_and_port_are_an_address(name: str) -> None:
    status, error = asked(name, "127.0.0.1:1")
    assert status == 1 and "no server answers at http://127.0.0.1:1" in error
    assert "--url" not in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("http://host", True),
        ("localhost:8000", True),
        ("[::1]:8000", True),
        ("10.0.0.1:80", True),
        ("meta-llama/Llama-3", False),
        ("repo/model:file.gguf", False),
        ("random:hidden=64", False),
        ("smollm2", False),
        ("./t.jsonl", False),
    ],
)
def test_an_address_is_told_from_a_file_or_a_model(word: str, expected: bool) -> None:
    assert is_address(word) is expected


def test_a_file_named_like_an_address_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "log:1").touch()
    assert not is_address("log:1") and is_address("log:2")


def test_addresses_are_completed() -> None:
    assert full_url(" host:1/ ") == "http://host:1" and full_url("https://h/v1") == "https://h/v1"


def test_figures_name_no_key() -> None:
    words = ["trial", "u", "--api-key", "sk-1", "--api-key=sk-2", "--seed", "1"]
    shown = without_keys(words)
    assert shown == ["trial", "u", "--api-key", "...", "--api-key=...", "--seed", "1"]
