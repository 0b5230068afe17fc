"""The look that all pages share, and pages put together of their parts.

A page is one file that loads nothing: style and scripts are written into it here.
"""

from __future__ import annotations

import re
from importlib import resources

_PART = re.compile(r"/\* (look|[a-z_]+\.js) \*/")


def look() -> str:
    """The style sheet of all pages."""
    return resources.files(__package__).joinpath("look.css").read_text(encoding="utf-8")


def whole_page(package: str, file_name: str) -> str:
    """Returns an HTML file of `package` with the parts that its comments name: `/* look */`, and
    scripts such as `/* chat.js */` of the same package."""
    folder = resources.files(package)

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return look() if name == "look" else folder.joinpath(name).read_text(encoding="utf-8")

    return _PART.sub(part, folder.joinpath(file_name).read_text(encoding="utf-8"))
