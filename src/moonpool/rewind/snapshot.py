"""Writes the state of a Conductor as bytes, and reads it back.

The bytes are a table in msgpack: a node for each object, which names others by their number. Only
plain data is stored: containers, numpy arrays, and the fields of the package's own objects. Reading
creates objects without calling their constructors, and only of classes that are allowed.
"""

from __future__ import annotations

import importlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count
from types import MethodType
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

ALLOWED = (
    "moonpool.conductor.",
    "moonpool.kvcache.",
    "moonpool.cost.",
    "moonpool.protocol.",
    "moonpool.distributions:",
    "moonpool.config.slo",
    "moonpool.config.tables",
    "moonpool.types",
    "moonpool.request_record",
)
"""Beginnings of the names of modules whose classes and functions a snapshot may contain."""

_REFERENCE, _LARGE_INT = 1, 2
_CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "set": set,
    "deque": deque,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
_MAPPINGS = ("dict", "OrderedDict", "Counter")
_UNSET = object()
MAX_NODES = 50_000_000


class SnapshotError(Exception):
    """The state contains what cannot be stored, or the bytes are not a snapshot; one line says
    why."""


def dump(root: object, extra: Iterable[Any] = ()) -> bytes:
    """Returns the object and all that it refers to. `extra`: classes and functions that are
    allowed too.

    Raises SnapshotError for an object of another class.
    """
    return _Writer(extra).write(root)


def load(data: bytes, extra: Iterable[Any] = ()) -> Any:
    """Returns the object that was stored. Raises SnapshotError."""
    try:
        nodes = msgspec.msgpack.decode(data)
        if not isinstance(nodes, list) or not 0 < len(nodes) <= MAX_NODES:
            raise SnapshotError("it has no objects")
        return _Reader(nodes, extra).read()
    except SnapshotError:
        raise
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise SnapshotError(f"{type(error).__name__}: {error}") from None
    except (ImportError, OverflowError, RecursionError, MemoryError) as error:
        raise SnapshotError(f"{type(error).__name__}: {error}") from None


class _Writer:
    def __init__(self, extra: Iterable[Any]) -> None:
        self._extra = {_name(each) for each in extra}
        self._numbers: dict[int, int] = {}  # by identity
        # keeps the objects alive, so that no other object gets the id of one
        self._objects: list[Any] = []

    def write(self, root: object) -> bytes:
        self._number(root)
        nodes = []
        for each in self._objects:  # the list grows while it is read
            nodes.append(self._node(each))
        return msgspec.msgpack.encode(nodes)

    def _number(self, value: Any) -> int:
        found = self._numbers.get(id(value))
        if found is None:
            found = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return found

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes):
            return value
        if kind is int:
            if -(1 << 63) <= value < 1 << 63:
                return value
            length = value.bit_length() // 8 + 1
            return Ext(_LARGE_INT, value.to_bytes(length, "little", signed=True))
        return Ext(_REFERENCE, self._number(value).to_bytes(4, "little"))

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind.__name__ in _CONTAINERS and kind is _CONTAINERS[kind.__name__]:
            return self._container(value, kind.__name__)
        if kind in (tuple, frozenset):
            return [kind.__name__, [self._value(each) for each in value]]
        if isinstance(value, tuple):  # a NamedTuple
            return ["named", self._allowed(kind), [self._value(each) for each in value]]
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic):
            return ["scalar", value.dtype.str, value.tobytes()]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        if kind is count:
            return ["count", int(repr(value)[6:-1])]
        if kind is MethodType:
            return ["method", self._value(value.__self__), value.__name__]
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return ["global", self._allowed(value)]
        if isinstance(value, Enum):
            return ["enum", self._allowed(kind), self._value(value.value)]
        return self._instance(value)

    def _container(self, value: Any, name: str) -> list[Any]:
        if name in _MAPPINGS:
            return [name, [self._value(each) for pair in value.items() for each in pair]]
        items = [self._value(each) for each in value]
        return [name, items, value.maxlen] if name == "deque" else [name, items]

    def _array(self, value: Any) -> list[Any]:
        if value.dtype.hasobject:
            raise SnapshotError("an array of objects cannot be stored")
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base is value:
            return ["array", value.dtype.str, list(value.shape), value.tobytes()]
        offset = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        place = [offset, list(value.shape), list(value.strides)]
        return ["view", value.dtype.str, self._value(base), *place]

    def _instance(self, value: Any) -> list[Any]:
        fields = {name: self._value(each) for name, each in _fields(value).items()}
        kind = "struct" if isinstance(value, msgspec.Struct) else "object"
        return [kind, self._allowed(type(value)), fields]

    def _allowed(self, what: Any) -> str:
        name = _name(what)
        if not name.startswith(ALLOWED) and name not in self._extra:
            raise SnapshotError(f"{name} cannot be stored")
        return name


class _Reader:
    """Creates first the mutable objects, empty, then the immutable ones, and then fills the mutable
    ones."""

    def __init__(self, nodes: list[Any], extra: Iterable[Any]) -> None:
        self._nodes = nodes
        self._extra = {_name(each): each for each in extra}
        self._made: list[Any] = [_UNSET] * len(nodes)
        self._ints: dict[int, int] = {}  # makes equal ints one object, as in the prefix index

    def read(self) -> Any:
        for number, node in enumerate(self._nodes):
            if node[0] in _CONTAINERS:
                made = deque(maxlen=node[2]) if node[0] == "deque" else _CONTAINERS[node[0]]()
                self._made[number] = made
            elif node[0] == "object":
                self._made[number] = object.__new__(self._class(node[1]))
        for number in range(len(self._nodes)):
            self._get(number)
        for number, node in enumerate(self._nodes):
            self._fill(self._made[number], node)
        return self._made[0]

    def _get(self, number: int) -> Any:
        made = self._made[number]
        if made is _UNSET:
            made = self._made[number] = self._make(self._nodes[number])
        return made

    def _value(self, value: Any) -> Any:
        if not isinstance(value, Ext):
            return self._ints.setdefault(value, value) if type(value) is int else value
        if value.code == _LARGE_INT:
            large = int.from_bytes(value.data, "little", signed=True)
            return self._ints.setdefault(large, large)
        if value.code != _REFERENCE:
            raise SnapshotError(f"an unknown kind of value: {value.code}")
        return self._get(int.from_bytes(value.data, "little"))

    def _make(self, node: list[Any]) -> Any:
        match node:
            case ["tuple", items]:
                return tuple(self._value(each) for each in items)
            case ["named", name, items]:
                return self._class(name)(*[self._value(each) for each in items])
            case ["frozenset", items]:
                return frozenset(self._value(each) for each in items)
            case ["array", dtype, shape, data]:
                return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
            case ["view", dtype, base, offset, shape, strides]:
                return np.ndarray(shape, dtype, self._value(base), offset, strides)
            case ["scalar", dtype, data]:
                return np.frombuffer(data, dtype=dtype)[0]
            case ["range", start, stop, step]:
                return range(start, stop, step)
            case ["count", start]:
                return count(start)
            case ["method", owner, name]:
                return MethodType(getattr(type(self._value(owner)), name), self._value(owner))
            case ["global", name]:
                return self._global(name)
            case ["enum", name, value]:
                return self._class(name)(self._value(value))
            case ["struct", name, fields]:
                kind = self._class(name)
                return kind(**{key: self._value(each) for key, each in fields.items()})
        raise SnapshotError(f"an unknown kind of object: {node[0]!r}")

    def _fill(self, made: Any, node: list[Any]) -> None:
        match node:
            case [("dict" | "OrderedDict" | "Counter"), items]:
                values = iter([self._value(each) for each in items])
                for key in values:
                    made[key] = next(values)
            case ["list" | "deque", items, *_]:
                made.extend(self._value(each) for each in items)
            case ["set", items]:
                made.update(self._value(each) for each in items)
            case ["object", _, fields]:
                for name, value in fields.items():
                    object.__setattr__(made, name, self._value(value))

    def _class(self, name: str) -> Any:
        found = self._global(name)
        if not isinstance(found, type):
            raise SnapshotError(f"{name} is no class")
        return found

    def _global(self, name: str) -> Any:
        if name in self._extra:
            return self._extra[name]
        module, _, path = name.partition(":")
        if not name.startswith(ALLOWED):
            raise SnapshotError(f"{name} is not allowed in a snapshot")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        if getattr(found, "__module__", None) != module:
            raise SnapshotError(f"{name} is not allowed in a snapshot")
        return found


def _name(what: Any) -> str:
    return f"{what.__module__}:{what.__qualname__}"


def _fields(value: Any) -> dict[str, Any]:
    """Returns the fields of an object, in slots or in `__dict__`, except those in its class's
    NOT_STORED. The driver sets these, and after a read the class uses others in their place."""
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    found = dict(getattr(value, "__dict__", {}))
    for name in getattr(type(value), "NOT_STORED", ()):
        found.pop(name, None)
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found
