"""Draws sentences of docstrings, comments and pages, to judge the English of the repository.

    python -m tests.tidy.sentences --seed 7 --count 100

Use a new seed each time, because sentences that were judged before may have been mended. `--all`
prints every sentence of the files named.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_END = re.compile(
    r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!cf\.)(?<!vs\.)[)`\"*]?\s+(?=[A-Z`\"(*\[0-9])"
)
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*[-*] )|\n(?=\s*\d+\. )|\n(?=\s{4,}\S)")
_NOT_PROSE = re.compile(r"type: ignore|noqa|fmt: |pragma|^\W*$|^!")
_GENERATED = ("docs/benchmarks.md", "docs/config.md", "CHANGELOG.md")


class Block(NamedTuple):
    """Holds a docstring, a run of comment lines, or a paragraph of a page."""

    path: str
    line: int
    name: str
    """The name of the described class, function or attribute, or "" for a comment or page."""
    text: str

    def sentences(self) -> list[str]:
        paragraphs = _PARAGRAPH.split(inspect.cleandoc(self.text))
        joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
        return [s for paragraph in joined for s in _END.split(paragraph) if len(s.split()) > 2]


def blocks_of(path: str) -> list[Block]:
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return list(_of_page(path, text))
    return sorted([*_docstrings(path, text), *_comments(path, text)], key=lambda b: b.line)


def _docstrings(path: str, text: str) -> Iterator[Block]:
    """Yields docstrings, and the strings that stand below an attribute."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        named = getattr(node, "name", "module")
        for before, part in zip([None, *node.body], node.body, strict=False):
            if not isinstance(part, ast.Expr) or not isinstance(part.value, ast.Constant):
                continue
            if isinstance(part.value.value, str):
                name = named if before is None else ast.unparse(before)[:50].partition("=")[0]
                yield Block(path, part.lineno, name, part.value.value)


def _comments(path: str, text: str) -> Iterator[Block]:
    """Yields comments. Comments on consecutive lines of their own are one comment."""
    found: list[Block] = []
    joins = False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or _NOT_PROSE.search(token.string.lstrip("# ")):
            continue
        words = token.string.lstrip("#").strip()
        alone = token.line.lstrip().startswith("#")
        last = found[-1] if found else None
        if last and joins and alone and last.line + last.text.count("\n") + 1 == token.start[0]:
            found[-1] = last._replace(text=f"{last.text}\n{words}")
        else:
            found.append(Block(path, token.start[0], "", words))
        joins = alone
    yield from found


def _of_page(path: str, text: str) -> Iterator[Block]:
    """Yields paragraphs and cells of tables, without code and headings."""
    prose = re.sub(r"^( *)```.*?^ *```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", prose):
        if paragraph.lstrip().startswith("|"):
            for number, row in enumerate(paragraph.splitlines()):
                cells = [cell.strip() for cell in row.strip(" |").split(" | ")]
                yield from (
                    Block(path, line + number, "", c) for c in cells if ". " in c or len(c) > 40
                )
        elif paragraph.strip() and not paragraph.lstrip().startswith(("#", "<", "![")):
            yield Block(path, line, "", paragraph)
        line += paragraph.count("\n")


def files() -> list[str]:
    """Returns the Python files and pages that git follows, without the files that a program
    writes."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [path for path in listed.stdout.splitlines() if path not in _GENERATED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--all", nargs="*", metavar="FILE", help="print every sentence of FILEs")
    given = parser.parse_args()
    pool = [
        f"{block.path}:{block.line}: {f'[{block.name.strip()}] ' if block.name else ''}{sentence}"
        for path in (given.all or files())
        for block in blocks_of(path)
        for sentence in block.sentences()
    ]
    if given.all is None:
        pool = random.Random(given.seed).sample(pool, min(given.count, len(pool)))
    print("\n".join(pool))


if __name__ == "__main__":
    main()
