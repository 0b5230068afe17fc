"""Writes the sources of the site: `python -m website FOLDER`. `make docs` then runs MkDocs on them.

MkDocs has an environment of its own (`requirements-docs.lock`), so this part imports none of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from moonpool.api.openapi import openapi_document
from website.command_page import command_page
from website.http_page import http_page, reference_routes
from website.pages import write_pages

ROOT = Path(__file__).resolve().parents[1]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(folder: Path) -> None:
    """Write the pages of the site into FOLDER, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    document = openapi_document(reference_routes())
    (folder / "openapi.json").write_bytes(document)
    (folder / "http.md").write_text(http_page(document))
    (folder / "commands.md").write_text(command_page())
    written = write_pages(ROOT, folder)
    click.echo(f"{folder}: {written} pages and files, commands.md, http.md and openapi.json")


if __name__ == "__main__":
    main(prog_name="python -m website")
