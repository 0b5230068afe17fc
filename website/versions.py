"""Several versions of the site in one folder: `python -m website.versions SITE FOLDER`.

FOLDER gets a folder for the version, `versions.json` in the form of mike, which the pages' switch
reads, and a first page that leads to the newest. Any file server can send it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
from packaging.version import InvalidVersion, Version

from moonpool import __version__

FIRST_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>moonpool</title>
<meta http-equiv="refresh" content="0; url={version}/index.html"></head>
<body><a href="{version}/index.html">moonpool {version}</a></body></html>
"""


def publish(site: Path, folder: Path, version: str) -> list[str]:
    """Puts the site into the folder as this version and replaces an earlier copy. Returns the
    versions there, newest first. Raises FileNotFoundError if the site is not built."""
    if not (site / "index.html").is_file():
        raise FileNotFoundError(f"{site} has no index.html: build the site first")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(site, folder / version)
    found = [path.parent.name for path in folder.glob("*/index.html")]
    versions = sorted((name for name in found if _is_version(name)), key=Version, reverse=True)
    releases = [name for name in versions if not Version(name).is_prerelease]
    latest = (releases or versions)[0]
    entries = [
        {"version": name, "title": name, "aliases": ["latest"] if name == latest else []}
        for name in versions
    ]
    (folder / "versions.json").write_text(json.dumps(entries, indent=1) + "\n")
    (folder / "index.html").write_text(FIRST_PAGE.format(version=latest))
    return versions


def _is_version(name: str) -> bool:
    try:
        Version(name)
    except InvalidVersion:
        return False
    return True


@click.command()
@click.argument("site", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--as", "version", default=__version__, show_default=True, help="The version.")
def main(site: Path, folder: Path, version: str) -> None:
    """Add the built SITE to the versions in FOLDER."""
    if not _is_version(version):
        raise click.BadParameter(f"{version} is no version such as 0.2.0 or 0.3.0.dev1")
    try:
        versions = publish(site, folder, version)
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{folder}: {', '.join(versions)}")


if __name__ == "__main__":
    main(prog_name="python -m website.versions")
