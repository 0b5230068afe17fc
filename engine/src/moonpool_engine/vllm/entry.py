"""The class that vLLM gets: the pool's connector, or one that moves nothing where this vLLM's
interface is not known. So a change in vLLM causes one line here, and no wrong answer."""

from __future__ import annotations

import functools
from typing import Any

from moonpool_engine.vllm.idle_connector import idle_connector
from moonpool_engine.vllm.known_interface import TRIED, why_unknown


def __getattr__(name: str) -> Any:
    if name == "MoonpoolConnector":
        return _connector()
    raise AttributeError(name)


@functools.cache
def _connector() -> Any:
    """Raises ImportError, with one line, if this vLLM has no connectors of this kind at all."""
    import vllm

    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import base

        reason = why_unknown(vllm.__version__, base.KVConnectorBase_V1)
        if reason:
            return idle_connector(base, reason)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"vLLM {vllm.__version__} has no connectors that moonpool knows ({error}): the"
            f" connector was tried with {' and '.join(TRIED)}"
        ) from None
    from moonpool_engine.vllm.connector import MoonpoolConnector

    return MoonpoolConnector
