"""The decision records have one shape, one index, and links that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"
INDEX = FOLDER / "README.md"
RECORDS = sorted(path for path in FOLDER.glob("*.md") if path != INDEX)
MAX_LINES = 60
MAX_WORDS = 45
REQUIRED = ["Context", "Decision", "Consequences"]
ALLOWED = [[*REQUIRED], [*REQUIRED, "Dropped"]]


def sentences(text: str) -> list[str]:
    """The sentences of a page, without headings, tables and link targets."""
    lines = [line for line in text.splitlines() if not line.startswith(("#", "|"))]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    found = []
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        flat = " ".join(block.split()).removeprefix("- ")
        found += re.split(r"(?<=[.?!])\s+(?=[A-Z0-9`\[])", flat)
    return [sentence for sentence in found if sentence]


def test_there_are_records() -> None:
    assert len(RECORDS) >= 35


def test_numbers_are_unique() -> None:
    numbers = [int(path.name.split("-")[0]) for path in RECORDS]
    assert len(set(numbers)) == len(numbers)


def test_the_index_lists_each_record_once_in_order() -> None:
    rows = re.findall(r"^\| (\d{3}) \| \[(.+)\]\((.+?)\) \| (.+) \|$", INDEX.read_text(), re.M)
    listed = [(number, title, target) for number, title, target, _ in rows]
    headed = []
    for path in RECORDS:
        number, _, title = path.read_text().splitlines()[0].removeprefix("# ").partition(" ")
        headed.append((number, title, path.name))
    assert listed == headed


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_short_and_has_the_headings(record: Path) -> None:
    lines = record.read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert re.fullmatch(rf"# {record.name[:3]} \S.*", lines[0])
    headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert headings in ALLOWED, headings


@pytest.mark.parametrize("page", [*RECORDS, INDEX], ids=lambda path: path.stem)
def test_links_exist_and_sentences_are_short(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for sentence in sentences(text):
        assert len(sentence.split()) <= MAX_WORDS, sentence
