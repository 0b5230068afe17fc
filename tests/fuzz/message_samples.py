"""Draws valid msgpack messages of any msgspec type, from which the inputs of the readers of frames
are made."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec import inspect


def samples_of(kind: Any, seed: int, count: int = 40) -> list[bytes]:
    """Returns encoded messages of a type; each decodes to that type."""
    draw = _Draw(random.Random(seed))
    info = inspect.type_info(kind)
    found = [msgspec.msgpack.encode(draw.value(info)) for _ in range(count)]
    for sample in found:
        msgspec.msgpack.decode(sample, type=kind)
    return found


MAX_DEPTH = 5
"""The largest number of nested structs."""


class _Draw:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._depth = 0

    def value(self, info: inspect.Type) -> Any:
        rng = self._rng
        if isinstance(info, inspect.UnionType):
            return self.value(rng.choice(info.types))
        if isinstance(info, inspect.StructType):
            return self._struct(info)
        if isinstance(info, inspect.LiteralType):
            return rng.choice(info.values)
        if isinstance(info, inspect.EnumType):
            return rng.choice([member.value for member in info.cls])
        if isinstance(info, inspect.VarTupleType | inspect.ListType):
            return [self.value(info.item_type) for _ in range(self._length(info))]
        if isinstance(info, inspect.TupleType):
            return [self.value(item) for item in info.item_types]
        if isinstance(info, inspect.DictType):
            return {
                self.value(info.key_type): self.value(info.value_type)
                for _ in range(rng.randrange(3))
            }
        return self._plain(info)

    def _length(self, info: inspect.VarTupleType | inspect.ListType) -> int:
        return self._rng.randrange(4) + (info.min_length or 0)

    def _struct(self, info: inspect.StructType) -> Any:
        self._depth += 1
        fields = {
            field.encode_name: self.value(field.type)
            for field in info.fields
            # limits the depth, because a struct may contain its own type
            if field.required or self._depth < MAX_DEPTH
        }
        self._depth -= 1
        if info.array_like:
            return ([info.tag] if info.tag is not None else []) + list(fields.values())
        return ({info.tag_field: info.tag} if info.tag_field else {}) | fields

    def _plain(self, info: inspect.Type) -> Any:
        rng = self._rng
        if isinstance(info, inspect.Metadata):  # a type that has a description
            return self.value(info.type)
        if isinstance(info, inspect.BoolType):
            return rng.random() < 0.5
        if isinstance(info, inspect.IntType):
            least, most = int(info.ge or 0), int(info.le or 1000)
            return rng.randint(least, max(least, most))
        if isinstance(info, inspect.FloatType):
            return float(info.gt or info.ge or 0) + rng.random() / 2
        if isinstance(info, inspect.StrType):
            return rng.choice(("", "a", "prefill-0", "text é")).ljust(info.min_length or 0, "x")
        if isinstance(info, inspect.BytesType):
            return rng.randbytes(rng.choice((0, 16, 24)))
        if isinstance(info, inspect.NoneType):
            return None
        assert isinstance(info, inspect.AnyType | inspect.CustomType | inspect.RawType), info
        return None
