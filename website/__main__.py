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
from website.look import style_sheet
from website.pages import write_pages
from website.search_rank import page_head

ROOT = Path(__file__).resolve().parents[1]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(folder: Path) -> None:
    """Write the pages of the site into FOLDER, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    document = openapi_document(reference_routes())
    (folder / "openapi.json").write_bytes(document)
    for name, text in (("http.md", http_page(document)), ("commands.md", command_page())):
        (folder / name).write_text(page_head(name) + text)
    (folder / "look.css").write_text(style_sheet())
    shutil.copy(ROOT / "website" / "page.js", folder)
    written = write_pages(ROOT, folder)
    click.echo(f"{folder}: {written} pages and files, commands.md, http.md and openapi.json")


if __name__ == "__main__":
    main(prog_name="python -m website")
