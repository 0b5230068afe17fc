"""Tests use what is public. A private name of another object ties a test to how a thing is done, so
that nobody can do it in another way; the number of such uses may only fall."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_USES = 29
"""Set it to the new number when there are fewer. Never raise it: give what a test needs a public
name, or look at what the thing does."""
NOT_OURS = {"_replace", "_asdict", "_fields", "_make"}  # public, of each NamedTuple
NOT_OURS |= {"_repr_html_"}  # of notebooks
NOT_OURS |= {"_attn_implementation", "_experts_implementation"}  # of transformers


def test_uses_of_private_names_only_fall() -> None:
    files = (ROOT / "tests").rglob("*.py")
    uses = [use for path in sorted(files) for use in private_uses(path.read_text(), path)]
    listed = "\n".join(uses)
    assert len(uses) <= MOST_USES, f"{len(uses)} uses, {MOST_USES} are allowed:\n{listed}"
    assert len(uses) == MOST_USES, f"there are fewer: set MOST_USES to {len(uses)}"


def test_a_private_name_of_another_object_or_module_is_a_use() -> None:
    text = "from a import _b\nself._c\ncls._d\nx._e._f\nself.x._g\ny._replace(z=1)\nw.__dict__\n"
    found = sorted(use.rpartition(" ")[2] for use in private_uses(text, ROOT / "x.py"))
    assert found == ["_b", "self.x._g", "x._e", "x._e._f"]


def private_uses(text: str, path: Path) -> Iterator[str]:
    """A line for each: place and expression. What an object does with its own is none."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found = [name.name for name in node.names if _is_private(name.name)]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found = [] if own else [ast.unparse(node)]
        else:
            continue
        yield from (f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NOT_OURS
