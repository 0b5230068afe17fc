"""The errors that the page explains are those that the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = ("src/moonpool", "engine/src", "lab/src")


def texts() -> list[str]:
    """What the page's second table quotes: `...` stands for what differs."""
    table = PAGE.read_text().partition("## By the words of an error")[2]
    return re.findall(r"^\| `([^`]+)` \|", table, re.M)


def said() -> str:
    """All strings of the sources, with `\\0` for each value within one."""
    parts = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts.append(
                        "".join(
                            str(each.value) if isinstance(each, ast.Constant) else "\0"
                            for each in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    parts.append(re.sub(r"%[-.0-9]*[a-z]", "\0", node.value))
    return "\n".join(parts)


SAID = said()


def test_there_are_texts() -> None:
    assert len(texts()) > 10


@pytest.mark.parametrize("text", texts())
def test_the_text_is_said(text: str) -> None:
    pattern = ".{0,40}".join(re.escape(part) for part in text.split("..."))
    assert re.search(pattern, SAID), text
