"""The names of a model's parts, as `llama-gguf-split` gives them: NAME-00001-of-00003.gguf."""

from __future__ import annotations

import re

MAX_PARTS = 1000
_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """Returns the names of all parts of the model that the file belongs to, or only its own name if
    the model has one part."""
    found = _NAME.fullmatch(name)
    if found is None:
        return [name]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= MAX_PARTS:
        return [name]
    return [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
