"""The look that all pages share, their charts, and pages put together of their parts.

`look.css` has the colours, lines and text styles of every chart. `chart.py` draws for pages without
a script, `chart.js` in pages that have one; moonpool_lab's drawings take the colours from here.

A page is one file that loads nothing: style and scripts are written into it here.
"""

from __future__ import annotations

import re
from importlib import resources

_PART = re.compile(r"/\* (look|chart|[a-z_]+\.js) \*/")
_SHARED = {"look": "look.css", "chart": "chart.js"}
_COLOUR = re.compile(r"--(\w+): (#[0-9a-f]+);")


def look() -> str:
    """The style sheet of all pages."""
    return _text(__package__, "look.css")


def colours() -> dict[str, str]:
    """The colours of the light look by name, such as `ink`, `rule`, and `c1` to `c5` of series."""
    light, _, _ = look().partition("@media")
    return dict(_COLOUR.findall(light))


def whole_page(package: str, file_name: str) -> str:
    """Returns an HTML file of `package` with the parts that its comments name: `/* look */`,
    `/* chart */`, and scripts such as `/* chat.js */` of the same package."""

    def part(match: re.Match[str]) -> str:
        shared = _SHARED.get(match[1])
        return _text(__package__, shared) if shared else _text(package, match[1])

    return _PART.sub(part, _text(package, file_name))


def _text(package: str, file_name: str) -> str:
    return resources.files(package).joinpath(file_name).read_text(encoding="utf-8")
