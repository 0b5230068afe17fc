"""Copies the pages that the site's readers can reach, and turns links to the site's paths."""

from __future__ import annotations

import os.path
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from website.notebook_page import notebook_page
from website.search_rank import page_head

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"(^```.*?^```\s*?$)", re.M | re.S)
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages beside docs/ that the site always has."""
NOTEBOOK = ".ipynb"


def write_pages(root: Path, folder: Path) -> int:
    """Writes docs/ and all files of the checkout that its pages link to; returns their number.

    A page keeps its path, without `docs/`; a notebook becomes a page. Raises
    FileNotFoundError for a link to no file.
    """
    waiting = [path for path in sorted((root / "docs").rglob("*")) if path.is_file()]
    waiting += [root / name for name in ROOT_PAGES]
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        target = folder / site_path(root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix not in (".md", NOTEBOOK):
            shutil.copyfile(path, target)
            continue
        text = path.read_text()
        text = notebook_page(text) if path.suffix == NOTEBOOK else text
        head = page_head(site_path(root, path).as_posix())
        target.write_text(head + turn_links(root, path, text))
        waiting += linked_files(root, path, text)
    return len(done)


def site_path(root: Path, path: Path) -> Path:
    """Returns where a file of the checkout is on the site; the README is the first page."""
    relative = path.relative_to(root)
    relative = relative.with_suffix(".md") if path.suffix == NOTEBOOK else relative
    if relative == Path("README.md"):
        return Path("index.md")
    return relative.relative_to("docs") if relative.parts[0] == "docs" else relative


def turn_links(root: Path, page: Path, text: str) -> str:
    """Returns the text with its links turned into paths of the site. A link to a plain folder
    becomes plain text."""

    def turned(match: re.Match[str]) -> str:
        mark, words, link = match.groups()
        target, _, anchor = link.partition("#")
        if is_outside(link) or not target:
            return match.group()
        path = _resolve(page, target)
        if path is None:
            return words
        own_folder = site_path(root, page).parent
        relative = os.path.relpath(site_path(root, path), own_folder)
        return f"{mark}[{words}]({relative}{'#' + anchor if anchor else ''})"

    return "".join(part if code else LINK.sub(turned, part) for code, part in _parts(text))


def linked_files(root: Path, page: Path, text: str) -> Iterable[Path]:
    """Yields the files of the checkout, but the README, that a page links to."""
    prose = "".join(part for code, part in _parts(text) if not code)
    for _, _, link in LINK.findall(prose):
        target = link.partition("#")[0]
        path = _resolve(page, target) if target and not is_outside(link) else None
        if path is not None and path != root / "README.md":
            yield path


def is_outside(link: str) -> bool:
    """True for an address of the web or of mail."""
    return re.match(r"[a-z]+:", link) is not None


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yields (is it a fenced block, text) in order."""
    for number, part in enumerate(FENCE.split(text)):
        yield number % 2 == 1, part


def _resolve(page: Path, target: str) -> Path | None:
    """Returns the file that a link leads to, or None for a folder without a README."""
    path = Path(os.path.normpath(page.parent / target))
    if path.is_dir():
        path = path / "README.md"
        return path if path.exists() else None
    if not path.exists():
        raise FileNotFoundError(f"{page}: no file {target}")
    return path
