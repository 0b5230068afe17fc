"""Tests that the decision pages have one form, are in their index, and have links that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"
INDEX = FOLDER / "README.md"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path != INDEX)
MAX_PAGES = 50
MAX_LINES = 60
MAX_WORDS = 45
HEADINGS = ["Decided", "Limits", "Not covered", "Dropped"]


def sentences(text: str) -> list[str]:
    """Returns the sentences of a page, without headings, tables and link targets."""
    lines = [line for line in text.splitlines() if not line.startswith(("#", "|"))]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    found = []
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        flat = " ".join(block.split()).removeprefix("- ")
        found += re.split(r"(?<=[.?!])\s+(?=[A-Z0-9`\[])", flat)
    return [sentence for sentence in found if sentence]


def test_subjects_stay_few() -> None:
    """Limits the number of pages: a new decision goes into the page of its subject."""
    assert 30 <= len(PAGES) <= MAX_PAGES


def test_the_index_lists_each_page_once() -> None:
    rows = re.findall(r"^\| \[(.+)\]\((.+?)\) \| (?:.+) \|$", INDEX.read_text(), re.M)
    headed = {(path.read_text().splitlines()[0].removeprefix("# "), path.name) for path in PAGES}
    assert len(rows) == len(PAGES)
    assert set(rows) == headed


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_is_short_and_says_what_was_decided_and_dropped(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert re.fullmatch(r"# \S.*", lines[0])
    headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert headings == [each for each in HEADINGS if each in headings]
    assert {"Decided", "Dropped"} <= set(headings)


@pytest.mark.parametrize("page", [*PAGES, INDEX], ids=lambda path: path.stem)
def test_links_exist_and_sentences_are_short(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for sentence in sentences(text):
        assert len(sentence.split()) <= MAX_WORDS, sentence
