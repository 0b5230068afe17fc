"""Installs today's clients, runs each against a live server, and writes docs/clients.md."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks.clients.environments import (
    HERE,
    Client,
    InstallError,
    command_line,
    environment,
    read_clients,
)
from benchmarks.clients.page import PAGE, RESULTS, page
from benchmarks.clients.results import merge, read_tries
from benchmarks.gguf_folder import write_tokenizer
from moonpool.cli.output import fail, one_line, origin, write_json
from moonpool.text.model_error import ModelError
from moonpool.text.tokenizer import TokenizerError
from moonpool_lab.demo.local_server import LocalServer, ServerError

TRY_S = 1800.0
"""Longest time of one client's script."""
FLAGS = ["smollm2", "--chat-template", "benchmarks/clients/hermes_tools.jinja"]


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "moonpool" / "clients",
    show_default=True,
    help="Folder of the clients' environments.",
)
@click.option("--check", is_flag=True, help="Only say whether the page is what the results give.")
def clients(names: tuple[str, ...], folder: Path, check: bool) -> None:
    """Run the clients NAMES (all without one) against a server, and write docs/clients.md.

    The model is SmolLM2 (the extra `smollm2`) with a chat template that knows tools. Rows of
    clients that do not run stay as they are.
    """
    if check:
        raise SystemExit(page(merge([])) != PAGE.read_text())
    chosen = [c for c in read_clients() if not names or c.name in names]
    if not chosen:
        known = ", ".join(client.name for client in read_clients())
        fail(f"there is no such client; there are {known}")
    # the written files would change the origin
    began = origin() | {"command": "python -m benchmarks.clients"}
    folder = folder.expanduser().absolute()
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    template = str(HERE / "hermes_tools.jinja")
    with (
        one_line(ServerError, ModelError, TokenizerError, OSError, httpx.HTTPError),
        LocalServer([FLAGS[0], "--chat-template", template]) as server,
    ):
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        write_tokenizer(FLAGS[0], tokenizer)
        variables = {
            "MOONPOOL_URL": server.url,
            "MOONPOOL_MODEL": model,
            "MOONPOOL_TOKENIZER": str(tokenizer),
        }
        for client in chosen:  # if the run ends in between, the rows so far are kept
            found = merge([_row(client, folder, variables)])
            found |= {"flags": FLAGS, "origin": began}
            write_json(str(RESULTS), found)
            PAGE.write_text(page(found))


def _row(client: Client, folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Installs and runs one client."""
    started = time.monotonic()
    tries: list[dict[str, Any]] = []
    install_error = ""
    try:
        line = command_line(client, folder)
    except InstallError as error:
        install_error = str(error)
    else:
        tries = _run(line, environment() | variables)
    said = install_error or ", ".join(
        t["feature"] if t["works"] else f"NOT {t['feature']} ({t['remark']})" for t in tries
    )
    click.echo(f"{client.name} {client.version} ({time.monotonic() - started:.0f} s): {said}")
    return {
        "name": client.name,
        "version": client.version,
        "install_error": install_error,
        "tries": tries,
    }


def _run(line: list[str], variables: dict[str, str]) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=TRY_S, env=variables)
    except subprocess.TimeoutExpired:
        return [{"feature": "all", "works": False, "remark": f"no end within {TRY_S:.0f} s"}]
    return read_tries(done.stdout, done.stderr)


if __name__ == "__main__":
    clients(prog_name="python -m benchmarks.clients")
