"""Runs a notebook's cells and writes what they show into it (`make notebook`).

The runner needs no Jupyter: cells share a name space, the value of a last expression is shown by
its `_repr_svg_`, `_repr_html_` and `repr`, and what a cell prints is kept. Cells of the
documentation simulate, so the same sources give the same outputs, byte for byte; a test holds that.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOKS = (Path(__file__).parents[1] / "docs" / "planning.ipynb",)
_VIEWS = (("image/svg+xml", "_repr_svg_"), ("text/html", "_repr_html_"))


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Returns the notebook with the outputs of its cells. The cells run in an empty folder. What a
    cell raises is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, number, here = [], 0, Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    number += 1
                    cell = cell | {"execution_count": number, "outputs": _run(cell, names, number)}
                cells.append(cell)
        finally:
            os.chdir(here)
    return notebook | {"cells": cells}


def _run(cell: dict[str, Any], names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(cell["source"], f"cell {number}")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)  # noqa: S102 - the project's own cells
        if isinstance(last, ast.Expr):
            shown = compile(ast.Expression(last.value), f"cell {number}", "eval")
            value = eval(shown, names)  # noqa: S307 - the project's own cells
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue()})
    if value is not None:
        data = {"text/plain": repr(value)}
        data |= {kind: getattr(value, view)() for kind, view in _VIEWS if hasattr(value, view)}
        outputs.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def text_of(notebook: dict[str, Any]) -> str:
    """The notebook as its file has it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Executes the notebooks named, or those of the documentation, in place."""
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(text_of(executed(notebook)), encoding="utf-8")
        print(f"executed: {path}")


if __name__ == "__main__":
    main()
