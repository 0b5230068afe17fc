"""Tests environments of the clients' table: which packages are pinned, and from where torch may
come."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.clients import environments
from benchmarks.clients.environments import Client, InstallError, command_line, read_clients


def test_every_package_is_pinned_and_every_script_exists() -> None:
    clients = read_clients()
    assert len(clients) > 20
    for client in clients:
        for package in client.packages:
            assert "@" in package[1:] if client.is_node else "==" in package, package
        assert (environments.SCRIPTS / client.script).is_file()


def limits_of(client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the versions to which the installer of a client's packages is held."""
    lines: list[list[str]] = []

    def run(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        lines.append(line)
        return subprocess.CompletedProcess(line, int("pip" in line[0]), "", "ERROR: no network")

    monkeypatch.setattr(environments.subprocess, "run", run)
    with pytest.raises(InstallError, match="no network"):
        command_line(client, folder)
    pip = lines[-1]
    return Path(pip[pip.index("-c") + 1]).read_text()


def test_torch_is_the_locked_one_or_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Client("a", ("a==1",), "try_a.py")
    assert limits_of(plain, tmp_path, monkeypatch) == "torch<0\n"
    limits = limits_of(plain._replace(torch=True), tmp_path, monkeypatch)
    assert limits.startswith("torch==") and limits.count("\n") == 1
    assert f"\n{limits.strip()} " in (environments.ROOT / "requirements.lock").read_text()
