"""Tests that `doctor`, `completion` and `man` work on any machine, with the parser that runs the
commands."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import click
import pytest

from moonpool.cli import doctor
from moonpool.cli.completion import PLACES, contexts
from moonpool.cli.main import cli
from moonpool.head.explain import SPOKEN_KINDS, SPOKEN_THINGS, spoken_name
from tests.cli_runner import invoke, succeed


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_doctor_says_what_is_there_and_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: "the HTTP API"})
        shown = invoke("doctor", "--json", file)
    assert shown.exit_code == 0
    checks = {check["name"]: check for check in json.loads(file.read_text())["checks"]}
    wanted = {"moonpool", "system", "cores", "CPU", "memory", "cache folder", "GPU", "open files"}
    assert wanted | {"shm", "Hub", "kernels"} <= checks.keys()
    assert "in use" in checks[f"port {port}"]["found"]
    assert checks[f"port {port}"]["advice"] == "name another by --port"
    assert checks["Hub"]["found"] == "off, by HF_HUB_OFFLINE"
    lines = shown.output.splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in checks)


@pytest.mark.parametrize("shell", PLACES)
def test_completion_is_a_script_of_that_shell(shell: str) -> None:
    shown = invoke("completion", shell).output
    assert shown.startswith(f"# {PLACES[shell]}\n") and f"{shell}_complete" in shown
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=shown, text=True, check=True)


def test_completion_completes_commands_and_flags() -> None:
    def completed(words: str) -> str:
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        environment["_MOONPOOL_COMPLETE"] = "bash_complete"
        return invoke(prog_name="moonpool", env=environment).output

    assert "plain,serve" in completed("moonpool se")
    assert "plain,--kv-tokens" in completed("moonpool serve --kv-t")


def test_there_is_a_manual_page_of_every_command(tmp_path: Path) -> None:
    succeed("man", "--to", tmp_path)
    for context in contexts(cli):
        page = (tmp_path / f"{context.command_path.replace(' ', '-')}.1").read_text()
        for param in context.command.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert param.opts[0].replace("-", r"\-") in page
    groff = shutil.which("groff")
    if groff is not None:
        page = tmp_path / "moonpool-serve.1"
        line = [groff, "-man", "-Tutf8", "-ww", str(page)]
        assert subprocess.run(line, capture_output=True, text=True).stderr == ""


def test_a_hash_has_a_name_that_stays() -> None:
    assert len(set(SPOKEN_KINDS)) == len(set(SPOKEN_THINGS)) == 64
    assert spoken_name(b"abcdefgh") == spoken_name(b"abcd") != spoken_name(b"abce")
    with pytest.raises(ValueError, match="four bytes"):
        spoken_name(b"abc")
