"""A connector that moves no blocks, for a vLLM version that is not known: vLLM then serves without
the pool."""

from __future__ import annotations

import inspect
import logging
from typing import Any


def idle_connector(base: Any, reason: str) -> Any:
    """Returns the class. `base` is vLLM's module of connectors; `reason` is logged at start, once
    for each vLLM, by its scheduler's side."""
    metadata = type("NoTransfers", (getattr(base, "KVConnectorMetadata", object),), {})
    parents = [base.KVConnectorBase_V1]
    if hasattr(base, "SupportsHMA"):  # otherwise vLLM refuses models with several kinds of KVCache
        parents.append(base.SupportsHMA)

    def start(
        self: Any,
        vllm_config: Any,
        role: Any,
        kv_cache_config: Any = None,
        *more: Any,
        **named: Any,
    ) -> None:
        given = (vllm_config, role, kv_cache_config, *more)
        begin = base.KVConnectorBase_V1.__init__
        begin(self, *_taken(begin, (self, *given), named), **named)
        if getattr(role, "name", "") == "SCHEDULER":
            logging.getLogger("vllm.moonpool").error(
                "vLLM serves without the KVCache pool: %s", reason
            )

    methods: dict[str, Any] = {
        name: lambda self, *_, **__: None
        for parent in parents
        for name in getattr(parent, "__abstractmethods__", ())
    }
    methods |= {
        "__init__": start,
        "__doc__": idle_connector.__doc__,
        "requires_kv_delivery": property(lambda self: False),
        "get_num_new_matched_tokens": lambda self, *_, **__: (0, False),
        "build_connector_meta": lambda self, *_, **__: metadata(),
        "request_finished": lambda self, *_, **__: (False, None),
        "request_finished_all_groups": lambda self, *_, **__: (False, None),
    }
    return type("MoonpoolConnector", tuple(parents), methods)


def _taken(begin: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments for the constructor of vLLM's own class: the first ones of those that
    vLLM passes to a connector."""
    signature = inspect.signature(begin)
    for count in range(len(given), 1, -1):
        try:
            signature.bind(*given[:count], **named)
        except TypeError:
            continue
        return given[1:count]
    return given[1:]
