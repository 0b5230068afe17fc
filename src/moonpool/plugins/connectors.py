"""Connectors of other engines to the KVCache pool, by entry points of `moonpool.connectors`."""

from __future__ import annotations

from typing import Any

from moonpool.installation import install_command
from moonpool.plugins.entry_points import entry_points, load

GROUP = "moonpool.connectors"


def connector_class(engine: str) -> Any:
    """Returns the class that this engine loads. Raises ImportError if its package is absent."""
    value = entry_points(GROUP).get(engine)
    if value is None:
        raise ImportError(
            f"the connector of {engine} is in another package: {install_command('engine')}, in the"
            f" environment of {engine}"
        )
    return load(value)
