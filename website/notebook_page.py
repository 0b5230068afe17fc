"""An executed notebook as a page of the site: text, code, and what the code showed."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from typing import Any

VIEWS = ("image/svg+xml", "text/html")


def notebook_page(text: str) -> str:
    """Returns the page as Markdown. `text` is that of the notebook's file."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", *_outputs(cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def _outputs(outputs: list[dict[str, Any]]) -> Iterator[str]:
    """Yields each output as one HTML block, the richest view of it."""
    for output in outputs:
        if output["output_type"] == "stream":
            shown = _plain("".join(output["text"]))
        else:
            data = {kind: "".join(view) for kind, view in output["data"].items()}
            rich = next((data[kind] for kind in VIEWS if kind in data), None)
            shown = rich.replace("\n", " ") if rich else _plain(data["text/plain"])
        yield f'<div class="output">{shown}</div>'


def _plain(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>".replace("\n", "&#10;")  # a blank line would end it
