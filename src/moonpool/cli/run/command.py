"""`moonpool run`: one model on this machine, with a chat in the terminal or the browser.

The command is `moonpool serve` with settings for one person: one instance that reads prompts and
writes answers, an SSD tier in the cache folder, long requests. The command prints what to paste
into other clients.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import click

from moonpool.cli.output import fail
from moonpool.cli.run.background_server import (
    BackgroundServer,
    ServerEndedError,
    choose_port,
)
from moonpool.cli.run.chat_stream import USUAL_TEMPERATURE, ChatError, with_temperature
from moonpool.cli.run.start_display import StartDisplay
from moonpool.cli.run.terminal_chat import TerminalChat, answer_once

DEFAULT_PORT = 8000
GIB = 1 << 30
DISK_SHARE = 0.1
DISK_SIZES = tuple(GIB * size // 4 for size in (1, 2, 4, 8, 16, 32, 64))
"""Steps, so that the tier keeps its size while other files come and go."""
REQUEST_TIMEOUT_S = 86_400


@click.command()
@click.argument("model", required=False)
@click.argument("words", metavar="[PROMPT]", nargs=-1)
@click.option("--prompt", help="The same as PROMPT after the model.")
@click.option("--system", default="", help="System prompt of the chat.")
@click.option("--open", "open_page", is_flag=True, help="Chat in the browser instead.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of an answer.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    help="Randomness of the tokens; 0 takes the likeliest. The model's own unless given, else"
    f" {USUAL_TEMPERATURE:g}.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    help="Most tokens of prompt and answer; unless given, what model and memory can hold.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; all cores unless given.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"Port of the API; {DEFAULT_PORT} unless given, or a free one if that is taken.",
)
@click.option(
    "--ssd/--no-ssd",
    default=True,
    show_default=True,
    help="Keep on disk what was computed of prompts (KVCache).",
)
@click.option("--verbose", is_flag=True, help="Show the server's log.")
def run(
    model: str | None,
    words: tuple[str, ...],
    prompt: str | None,
    system: str,
    open_page: bool,
    port: int | None,
    ssd: bool,
    verbose: bool,
    **settings: Any,
) -> None:
    """Chat with MODEL on this machine.

    MODEL is a GGUF file, a folder, or a Hugging Face id. With a PROMPT, or text by a pipe, the
    command answers that and ends. Any OpenAI or Anthropic client can use the server meanwhile. All
    commands and settings of a cluster: `moonpool serve`.
    """
    if words and prompt is not None:
        fail("two prompts: give --prompt, or the prompt after the model")
    prompt = " ".join(words) if words else prompt
    if model is not None and _is_missing(model):
        fail(f"{model} does not exist: give a GGUF file, a folder or a Hugging Face id")
    if prompt is None and not open_page and not sys.stdin.isatty():
        prompt = sys.stdin.read()
        if not prompt.strip():
            fail("the prompt on stdin is empty: give one, or write it after the model")
    if model is None:
        # imported here, because the import is slow
        from moonpool.cli.default_model import choose_model

        model = choose_model("run")
    name = _served_name(model)
    folder = _disk_folder(name) if ssd else None
    if folder is not None and not _disk_bytes(folder):
        folder = None  # no SSD tier, because the disk is nearly full
    arguments = _serve_arguments(model, name, folder, settings)
    chosen = choose_port(DEFAULT_PORT) if port is None else port or choose_port(0)
    wanted = {key: settings[key] for key in ("max_tokens", "temperature")}
    parameters = {key: value for key, value in wanted.items() if value is not None}
    _end_in_order()
    display = StartDisplay(verbose)
    try:
        with BackgroundServer(arguments, chosen, display.take) as server:
            server.wait_until_ready(display.look)
            display.end()
            if not open_page:
                parameters = with_temperature(parameters, chosen)
            if prompt is not None:
                answer_once(server, parameters, system, prompt)
                return
            _print_places(server.url, name, folder)
            if open_page:
                click.launch(server.url)
                click.echo("The browser shows the chat. Ctrl-C ends the server.")
                server.wait()
            else:
                click.echo("/help lists commands, Ctrl-D ends the chat.\n")
                TerminalChat(server, parameters, system).run()
    except ServerEndedError as error:
        display.end()
        fail("the server has ended: see its log above" if verbose else str(error))
    except ChatError as error:
        display.end()
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _served_name(model: str) -> str:
    """Returns the name in the API: the name of the file or folder; a Hub id stays unchanged."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf" or path.exists():
        return path.resolve().name.removesuffix(".gguf")
    return model


def _is_missing(model: str) -> bool:
    """Whether the name can only mean a file or folder, which does not exist."""
    path = Path(model)
    is_path = model.startswith(("/", "./", "../", "~")) or path.suffix == ".gguf"
    return is_path and ":" not in model and not path.expanduser().exists()


def _disk_folder(name: str) -> Path:
    """Returns the folder for the KVCache of this model."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "moonpool" / "run" / re.sub(r"[^\w.-]+", "-", name)


def _disk_bytes(folder: Path) -> int:
    """Returns the most bytes that the folder may take: the largest of `DISK_SIZES` within a tenth
    of the free space of its disk, in which what the folder holds counts as free; 0 if that is too
    little."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    status = os.statvfs(there)
    own = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    share = DISK_SHARE * (status.f_bavail * status.f_frsize + own)
    return max((size for size in DISK_SIZES if size <= share), default=0)


def _serve_arguments(
    model: str, name: str, folder: Path | None, settings: dict[str, Any]
) -> list[str]:
    """The flags of `moonpool serve` for one person."""
    words = [model, "--mixed", "1", "--served-model-name", name]
    words += ["--request-timeout", str(REQUEST_TIMEOUT_S), "--keepalive", "1"]
    words += ["--drain-seconds", "0"]
    for flag in ("max_model_len", "threads"):
        if settings[flag] is not None:
            words += [f"--{flag.replace('_', '-')}", str(settings[flag])]
    if folder is not None:
        words += ["--ssd-folder", str(folder), "--ssd-bytes", str(_disk_bytes(folder))]
    return words


def _print_places(url: str, name: str, folder: Path | None) -> None:
    variables = f"ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN=any ANTHROPIC_MODEL={name}"
    own = f"name: {name}, provider: openai, model: {name}, apiBase: {url}/v1, apiKey: any"
    rows = {
        "OpenAI clients": f"{url}/v1, any key, model {name}",
        "Anthropic clients": f"{url}, any key, model {name}",
        "Browser": url,
        "Claude Code": f"{variables} claude",
        "Continue": f"models: [{{{own}}}]",
        "Open WebUI": f"OPENAI_API_BASE_URL={url}/v1 OPENAI_API_KEY=any open-webui serve",
    }
    if folder is not None:
        size = f"{_disk_bytes(folder) / GIB:g} GiB"
        ways = f"--no-ssd turns it off, `moonpool pool clear {folder}` deletes it"
        rows["KVCache on disk"] = f"{folder}, at most {size} ({ways})"
    for what, how in rows.items():
        click.echo(f"{what + ':':<18} {how}")


def _end_in_order() -> None:
    """Lets a closed terminal and SIGTERM end the server too."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, end)
