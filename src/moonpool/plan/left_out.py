"""Why kinds of nodes are left out of a plan, each reason once for all sizes of a node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moonpool.plan.candidate import NodeKind

_NUMBER = re.compile(r"\d[\d.,]*")


class Reasons:
    """`lines` has one for the kinds that differ in size alone: that of the size which lacks least,
    and the other sizes. Kinds come in rising size."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], list[tuple[NodeKind, str]]] = {}

    def too_small(self, kind: NodeKind, why: str) -> None:
        """Notes a kind that more devices would make able."""
        self._alike(kind, why).append((kind, why))

    def too_large(self, kind: NodeKind, why: str) -> None:
        """Notes a kind that fewer devices would make able."""
        self._alike(kind, why).insert(0, (kind, why))

    def lines(self) -> Iterator[str]:
        for *others, (_, why) in self._found.values():
            sizes = sorted(kind.num_devices for kind, _ in others)
            yield f"{why} (nodes of {_listed(sizes)}, too)" if sizes else why

    def _alike(self, kind: NodeKind, why: str) -> list[tuple[NodeKind, str]]:
        key = kind.device, str(kind.num_attention) + kind.attention_device, _NUMBER.sub("", why)
        return self._found.setdefault(key, [])


def _listed(sizes: list[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}" if most else last
