"""The engine whose step times are recorded: small, on plain numpy, the same on every machine."""

from __future__ import annotations

from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.runner import Engine, make_layout

NAME = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=96,vocab=300,context=512"


def small_engine() -> Engine:
    model = open_model(NAME, "float32")
    return Engine(model, ReferenceOps(), empty_cache(make_layout(model, 16), 64))
