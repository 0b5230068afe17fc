"""Makes a standalone chart for notebooks and files, as SVG with its own style."""

from __future__ import annotations

import re
from pathlib import Path

from markupsafe import Markup

from moonpool.pages import look

_RULE = re.compile(r"^(?:svg |\.grid|\.base|\.bound|\.line|\.area|rect\.bar|\.tip|\.c1)")
_ROOT = re.compile(r":root \{([^}]*)\}")


class Drawing:
    """A chart with its title. Notebooks show it; `save` writes an .svg file."""

    def __init__(self, title: str, chart: Markup) -> None:
        self.title = title
        self._chart = str(chart)

    def __repr__(self) -> str:
        return f"<Drawing: {self.title}>"

    def _repr_svg_(self) -> str:
        head, _, rest = self._chart.partition(">")
        style = f"<style>{_style()}</style>"
        return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}'

    def save(self, path: str | Path) -> None:
        """Writes the SVG. Raises OSError."""
        Path(path).write_text(self._repr_svg_(), encoding="utf-8")


def _style() -> str:
    """Returns the style rules that charts need, in light colours. The rules apply only to charts,
    because a notebook is one document with other styles."""
    sheet = look()
    root = _ROOT.search(sheet)
    assert root is not None
    values = root[1].partition(";")[2]  # leaves out the choice of light or dark
    rules = [
        ", ".join(f"svg.plot {part.removeprefix('svg ').strip()}" for part in names.split(","))
        + " {"
        + body
        for line in sheet.splitlines()
        if _RULE.match(line)
        for names, _, body in [rule.partition("{") for rule in re.findall(r"[^{}]+\{[^}]*\}", line)]
    ]
    font = "font-family: system-ui, sans-serif; background: var(--card)"
    return f"svg.plot {{{values}; {font}}} {' '.join(rules)}".replace("\n", " ")
