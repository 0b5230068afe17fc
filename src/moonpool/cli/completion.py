"""`moonpool completion` and `moonpool man`: what a shell and `man` need to know about the
commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from moonpool import __version__
from moonpool.cli.examples import MARK
from moonpool.cli.help_screen import show_everything
from moonpool.cli.output import fail, writing

VARIABLE = "_MOONPOOL_COMPLETE"
PLACES = {
    "bash": 'eval "$(moonpool completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(moonpool completion zsh)" in ~/.zshrc, behind compinit',
    "fish": "moonpool completion fish | source in ~/.config/fish/config.fish",
}


@click.command()
@click.argument("shell", type=click.Choice([*PLACES]))
def completion(shell: str) -> None:
    """Print a script that completes commands and flags in SHELL.

    bash: put `eval "$(moonpool completion bash)"` into ~/.bashrc; zsh likewise, behind compinit;
    fish: `moonpool completion fish | source` in config.fish.
    """
    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root().command
    click.echo(f"# {PLACES[shell]}")
    click.echo(found(root, {}, "moonpool", VARIABLE).source())


@click.command()
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.option(
    "--to",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the pages of all commands into this folder, such as ~/.local/share/man/man1.",
)
def man(words: tuple[str, ...], folder: Path | None) -> None:
    """Print the manual page of COMMAND, such as `moonpool man pool ls | man -l -`."""
    root = click.get_current_context().find_root().command
    pages = {context.command_path: context for context in contexts(root)}
    if folder is None:
        name = " ".join(("moonpool", *words))
        if name not in pages:
            fail(f"there is no command {name}: see moonpool --help")
        click.echo(manual_page(pages[name]), nl=False)
        return
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, context in pages.items():
            (folder / f"{name.replace(' ', '-')}.1").write_text(manual_page(context))
    click.echo(f"{len(pages)} pages in {folder}: man -l {folder}/moonpool.1")


def contexts(root: click.Command) -> Iterator[click.Context]:
    """Yields a context of each visible command, the root first, with full help."""
    first = click.Context(root, info_name="moonpool")
    show_everything(first)
    waiting = [first]
    while waiting:
        context = waiting.pop(0)
        yield context
        command = context.command
        if not isinstance(command, click.Group):
            continue
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                waiting.append(click.Context(below, context, info_name=name))


def manual_page(context: click.Context) -> str:
    """Returns a command's page in roff, with the macros of man(7)."""
    command, path = context.command, context.command_path
    about = [line.strip() for line in (command.help or "").strip().splitlines()]
    title, _, more = "\n".join(about).partition("\n\n")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH "{path.replace(" ", "-").upper()}" 1 "" "moonpool {__version__}"',
        ".SH NAME",
        _text(f"{path.replace(' ', '-')} - {' '.join(title.split())}").replace(" - ", r" \- ", 1),
        ".SH SYNOPSIS",
        _text(f"{path} {usage}"),
    ]
    if more:
        lines += [".SH DESCRIPTION", *_text(more).replace("\n\n", "\n.PP\n").splitlines()]
    records = [
        param.get_help_record(context)
        for param in command.get_params(context)
        if isinstance(param, click.Option)
    ]
    options = [record for record in records if record is not None]
    if options:
        lines.append(".SH OPTIONS")
    for name, text in options:
        lines += [".TP", rf"\fB{_text(name)}\fR", _text(" ".join(text.split()))]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                lines += [".TP", rf"\fB{_text(name)}\fR", _text(below.get_short_help_str(200))]
    if command.epilog:
        shown = [line.removeprefix(MARK).strip() for line in command.epilog.splitlines()[1:]]
        lines += [".SH EXAMPLES", ".nf", *map(_text, shown), ".fi"]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Escapes what roff would read as its own: backslashes, hyphens, dots and quotes at the
    beginning of a line."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return "\n".join(
        rf"\&{line}" if line[:1] in (".", "'") else line for line in escaped.split("\n")
    )
