"""Tests that a server does not start without the protection that its flags ask for: one line,
status 1, and no open port."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.cli import serve
from moonpool.cli.serve import HEAD_FLAGS, SERVE_FLAGS
from moonpool.config.schema import schema_of
from moonpool.config.tables import Config
from tests.certificates import make_certificates
from tests.cli_runner import refusal

SECRET = "ab" * 32
PROTECTING = {name: field for name, field in schema_of(Config).items() if field.protects}
SERVING = [
    (command, field.flag)
    for command, flags in (("serve", SERVE_FLAGS), ("head", HEAD_FLAGS))
    for name, field in PROTECTING.items()
    if name in flags.keys
]
NO_KEYS = {"empty": "", "a comment": "# none yet\n\n", "blanks": " \n\t\n", "late": "\n\n#\n"}
NO_AUTHORITY = {"empty": "", "a comment": "# none yet\n", "no PEM": "x\n"}
EMPTY = ("", " ", "\t", ",", " , ,, ")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the server was about to start")

    monkeypatch.setattr(serve, "_open_fork_server", fail)
    monkeypatch.setenv("MOONPOOL_CLUSTER_SECRET", SECRET)
    for name in ("MOONPOOL_API_KEY", "MOONPOOL_ADMIN_KEY", "MOONPOOL_CLIENT_CERT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("command", "flag"), SERVING)
@pytest.mark.parametrize("value", ["", " "])
def test_a_flag_that_protects_is_not_given_empty(command: str, flag: str, value: str) -> None:
    assert f"({flag}) is given and empty" in refusal(command, flag, value)


@pytest.mark.parametrize("name", PROTECTING)
def test_a_key_of_the_file_that_protects_is_not_empty(tmp_path: Path, name: str) -> None:
    path = tmp_path / "moonpool.toml"
    table, key = name.split(".")
    values = ('""', '" "') if PROTECTING[name].kind is str else ('[""]', '["*", ""]')
    for value in values:
        path.write_text(f"[{table}]\n{key} = {value}\n")
        for words in (("serve", "--config"), ("config", "check")):
            assert f"{name} " in refusal(*words, str(path))


def test_what_protects_is_marked() -> None:
    for name, field in schema_of(Config).items():
        words = ("key_file", "cert", "keyfile", "ca_certs", "api_keys", "allowed", "host")
        is_address = name in ("api.host", "network.head_host")
        looks_so = field.table in ("api", "tls") and any(word in name for word in words)
        assert field.protects == (looks_so or is_address), name


@pytest.mark.parametrize("content", NO_KEYS)
@pytest.mark.parametrize("command", ["serve", "head", "standby"])
def test_a_key_file_has_a_key(tmp_path: Path, content: str, command: str) -> None:
    path = tmp_path / "keys"
    path.write_text(NO_KEYS[content])
    words = ["head", "--standby-of", "127.0.0.1:9"] if command == "standby" else [command]
    assert f"the key file {path} has no key" in refusal(*words, "--api-key-file", str(path))


@pytest.mark.parametrize("other", ["--api-key=k", "MOONPOOL_API_KEY", "MOONPOOL_ADMIN_KEY"])
def test_a_key_file_has_a_key_beside_other_keys(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    flags = [other] if other.startswith("--") else []
    if not flags:
        monkeypatch.setenv(other, "k")
    assert "has no key" in refusal("serve", "--api-key-file", "/dev/null", *flags)


def test_a_key_file_without_end_is_refusal() -> None:
    assert "/dev/zero" in refusal("serve", "--api-key-file", "/dev/zero")


@pytest.mark.parametrize("name", ["MOONPOOL_API_KEY", "MOONPOOL_ADMIN_KEY"])
@pytest.mark.parametrize("command", ["serve", "head"])
def test_a_variable_for_keys_has_one(
    monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    for value in EMPTY if name == "MOONPOOL_API_KEY" else EMPTY[:3]:
        monkeypatch.setenv(name, value)
        assert f"{name} is set and has no key" in refusal(command)


@pytest.mark.parametrize("value", ["", " ", "ab", "xyz", SECRET[:30]])
def test_the_secret_of_a_cluster_is_long_enough(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MOONPOOL_CLUSTER_SECRET", value)
    for words in (["head"], ["worker", "--role", "decode", "--head", "127.0.0.1:9"]):
        assert "MOONPOOL_CLUSTER_SECRET" in refusal(*words)


WORKER = ["worker", "--role", "decode", "--head", "127.0.0.1:9"]


@pytest.mark.parametrize("content", NO_AUTHORITY)
def test_an_authority_has_a_certificate(tmp_path: Path, content: str) -> None:
    own = make_certificates(tmp_path, "authority", "part")
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(NO_AUTHORITY[content])
    pair = ["--ssl-certfile", own.certfile, "--ssl-keyfile", own.keyfile]
    peer = ["--cluster-ssl-certfile", own.certfile, "--cluster-ssl-keyfile", own.keyfile]
    for path in (str(bundle), "/dev/null", own.keyfile):
        assert path in refusal("serve", *pair, "--ssl-ca-certs", path)
        assert path in refusal("head", *peer, "--cluster-ssl-ca-certs", path)
        assert path in refusal(*WORKER, *peer, "--cluster-ssl-ca-certs", path)
        assert path in refusal("status", "https://127.0.0.1:9", "--ca-file", path)


@pytest.mark.parametrize("flag", ["certfile", "keyfile", "ca-certs"])
def test_a_flag_of_a_worker_is_not_given_empty(flag: str) -> None:
    assert "is given and empty" in refusal(*WORKER, f"--cluster-ssl-{flag}", "")


@pytest.mark.parametrize(
    "words",
    [
        ["status", "https://127.0.0.1:9"],
        ["top", "https://127.0.0.1:9"],
        ["upgrade", "https://127.0.0.1:9"],
        ["replay", "--trace", "t", "--url", "https://127.0.0.1:9"],
        ["trial", "https://127.0.0.1:9"],
        ["profile", "--beliefs-of", "https://127.0.0.1:9"],
    ],
)
def test_whom_a_command_trusts_is_not_given_empty(words: list[str]) -> None:
    assert "--ca-file is given and empty" in refusal(*words, "--ca-file", "")


def test_the_certificate_of_a_command_is_not_set_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CLIENT_CERT", " ")
    assert "MOONPOOL_CLIENT_CERT is set and empty" in refusal("status", "https://127.0.0.1:9")
