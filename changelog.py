"""Writes CHANGELOG.md from the files in changes/: `make changelog`, or with `VERSION=0.2.0`.

A change comes with a file of its own in changes/, so that two changes never meet in one line of the
changelog. Each line of it is `Added, Subject: What a user notices.`; the kinds and subjects are
below. `make changelog` moves all of them into the section [Unreleased], and deletes the files. With
a version, that section becomes the version's, and an empty one begins.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
PAGE = ROOT / "CHANGELOG.md"
FOLDER = ROOT / "changes"
KINDS = ("Added", "Changed", "Fixed", "Removed")
SUBJECTS = (
    "Commands and configuration",
    "API and clients",
    "In front of vLLM and other servers",
    "The pool inside vLLM and SGLang",
    "Kubernetes, Ray, Slurm and gateways",
    "Programs and agents",
    "Placement, admission and roles",
    "Tenants, keys and security",
    "KVCache and SSD",
    "Models and engine",
    "Faults and upgrades",
    "Start and idle",
    "Pages, metrics and logs",
    "Simulation and planning",
    "Python and your own policies",
    "Measurements",
    "Installation and packages",
    "Documentation",
)
"""Kinds of changes in the order of the changelog."""

_UNRELEASED = "## [Unreleased]\n"
_CHANGE = re.compile(r"(\w+), ([^:]+): (\S.*)")
_SECTION = re.compile(r"^## \[", re.M)


class ChangelogError(Exception):
    """One line says what is wrong in which file, and what to do."""


class Change(NamedTuple):
    """One line of the changelog."""

    kind: str
    subject: str
    text: str


def read_fragment(path: Path) -> list[Change]:
    """Returns the changes of a file. Raises ChangelogError."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        match = _CHANGE.fullmatch(line.strip())
        if match is None:
            raise ChangelogError(f"{where}: write `Added, Subject: What a user notices.`")
        change = Change(*match.groups())
        for what, known in ((change.kind, KINDS), (change.subject, SUBJECTS)):
            if what not in known:
                raise ChangelogError(f"{where}: {what!r} is none of: {'; '.join(known)}")
        found.append(change)
    if not found:
        raise ChangelogError(f"{path.name}: the file has no change")
    return found


def read_fragments(folder: Path) -> list[Change]:
    """Returns the changes of all files except README.md, by name."""
    return [change for path in fragments(folder) for change in read_fragment(path)]


def fragments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.md") if path.name != "README.md")


def split_page(page: str) -> tuple[str, str, str]:
    """Returns the page up to [Unreleased], the lines of it, and the releases. Raises
    ChangelogError."""
    before, found, rest = page.partition(_UNRELEASED)
    if not found:
        raise ChangelogError("CHANGELOG.md has no section [Unreleased]")
    release = _SECTION.search(rest)
    end = release.start() if release else len(rest)
    return before, rest[:end], rest[end:]


def parse_section(text: str) -> list[Change]:
    """Returns the changes of a section. Raises ChangelogError for a line of another form."""
    kind = subject = ""
    found = []
    for line in text.splitlines():
        if line.startswith("### "):
            kind, subject = line[4:], ""
        elif line.startswith("#### "):
            subject = line[5:]
        elif line.startswith("- ") and kind in KINDS and subject in SUBJECTS:
            found.append(Change(kind, subject, line[2:]))
        elif line.strip():
            raise ChangelogError(
                "CHANGELOG.md: [Unreleased] has a line that is no change below a kind and a"
                f" subject: {line[:60]!r}"
            )
    return found


def render_section(changes: Iterable[Change]) -> str:
    """Returns the section by kind and subject; within one, in the order given."""
    blocks: dict[str, dict[str, list[str]]] = {}
    for change in changes:
        texts = blocks.setdefault(change.kind, {}).setdefault(change.subject, [])
        texts.append(f"- {change.text}")
    lines = [""]
    for kind in KINDS:
        if kind in blocks:
            lines += [f"### {kind}", ""]
        for subject in SUBJECTS:
            if texts := blocks.get(kind, {}).get(subject):
                lines += [f"#### {subject}", "", *texts, ""]
    return "\n".join(lines) + "\n"


def with_changes(page: str, changes: list[Change]) -> str:
    """Returns the page with the changes at the end of their places. Raises ChangelogError."""
    before, own, releases = split_page(page)
    section = render_section([*parse_section(own), *changes])
    return before + _UNRELEASED + section + releases


def with_release(page: str, version: str, day: date) -> str:
    """Returns the page with [Unreleased] as the version. Raises ChangelogError."""
    before, own, releases = split_page(page)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ChangelogError(f"{version!r} is no version such as 0.2.0")
    if f"## [{version}]" in releases:
        raise ChangelogError(f"CHANGELOG.md already has a section [{version}]")
    if not parse_section(own):
        raise ChangelogError("[Unreleased] is empty: nothing to release")
    return f"{before}{_UNRELEASED}\n## [{version}] - {day.isoformat()}\n{own}{releases}"


def main() -> None:
    """Rewrites the changelog; the fragments are deleted after it has been written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", help="the release that [Unreleased] becomes")
    version = parser.parse_args().version
    try:
        page = with_changes(PAGE.read_text(encoding="utf-8"), read_fragments(FOLDER))
        if version:
            page = with_release(page, version, datetime.now(UTC).date())
    except ChangelogError as error:
        sys.exit(f"changelog: {error}")
    PAGE.write_text(page, encoding="utf-8")
    used = fragments(FOLDER)
    for path in used:
        path.unlink()
    print(f"CHANGELOG.md: {len(used)} files of changes/ are in {version or 'Unreleased'}")


if __name__ == "__main__":
    main()
