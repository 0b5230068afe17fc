"""Mutates JSON but keeps its form: a field gets a value of another type, or an extreme value."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Sequence
from typing import Any

from tests.fuzz.mutation import Mutator

Place = tuple[str | int, ...]
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 4096, 10**6, 2**31, 2**32, 2**63, -(2**63), 10**30),
    *(0.0, 0.5, 1.0, -0.5, 1.5, 2.0, 1e-320, 1e300, math.inf, -math.inf, math.nan),
    *("", "0", "1", "-1", "nan", "true", "None", "model", "a\nb", "\0", "\ud800", "é", "x" * 5000),
    *("../x", "/etc/passwd", "/dev/zero", ".", "..", "a/../..", "config.json", "%s%n", "{{ x }}"),
    *([], [None], [0], [-1], [1.5], ["x"], [[]], [{}], [True], [1, 2, 3], [[[[0]]]], list("abcd")),
    *({}, {"": None}, {"a": {"b": []}}, {"type": "Sequence"}, {"Regex": "(a+)+$"}, {"String": ""}),
)
RAW_SHARE = 0.05
"""The share of inputs whose bytes are mutated, so that some inputs are not JSON."""


class FieldMutator:
    """Draws JSON that differs little from the samples. The same seed draws the same inputs."""

    def __init__(self, samples: Sequence[bytes], seed: int) -> None:
        self._samples = [json.loads(sample) for sample in samples]
        self._bytes = Mutator(samples, seed)
        self._rng = random.Random(seed)

    def draw(self) -> bytes:
        if self._rng.random() < RAW_SHARE:
            return self._bytes.draw()
        value = copy.deepcopy(self._rng.choice(self._samples))
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            self._change(value)
        return json.dumps(value).encode()

    def _change(self, value: Any) -> None:
        """Changes one field, drawn level by level, so that a long list does not hide a short
        one."""
        rng, parent = self._rng, value
        while True:
            keys: list[Any] = list(parent) if isinstance(parent, dict) else [*range(len(parent))]
            if not keys:
                return
            key = rng.choice(keys)
            child = parent[key]
            if not isinstance(child, dict | list) or not child or rng.random() < 0.15:
                break
            parent = child
        kind = rng.randrange(8)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(keys) + rng.choice(("", "s", "_"))] = child
        elif kind == 2:
            parent[key] = [child] * rng.choice((1, 2, 1000))
        elif kind == 3:
            parent[key] = _nested(child, rng.choice((1, 5, 250)))
        elif kind == 4 and isinstance(child, int | float):
            parent[key] = child * rng.choice((-1, 2, 3, 0.5, 10**6))
        else:
            parent[key] = copy.deepcopy(rng.choice(VALUES))


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = {"a": value}
    return value
