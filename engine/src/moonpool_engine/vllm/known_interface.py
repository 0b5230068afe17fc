"""The parts of vLLM's connector class that the connector expects, and the versions with which it
was tried."""

from __future__ import annotations

import inspect
from typing import Any

TRIED = ("0.32", "0.33")
"""Versions of vLLM, without what follows the second number. `docs/compatibility.md` lists the
runs."""
TRIED_WITH = f"the connector was tried with {' and '.join(TRIED)}"
_SELF = "self"
METHODS: dict[str, tuple[str, ...]] = {
    "__init__": (_SELF, "vllm_config", "role", "kv_cache_config"),
    "build_connector_meta": (_SELF, "scheduler_output"),
    "build_connector_worker_meta": (_SELF,),
    "get_external_cache_hit_sources": (_SELF, "request", "num_external_tokens"),
    "get_finished": (_SELF, "finished_req_ids"),
    "get_handshake_metadata": (_SELF,),
    "get_transfer_results": (_SELF, "finished_req_ids"),
    "get_num_new_matched_tokens": (_SELF, "request", "num_computed_tokens"),
    "handle_preemptions": (_SELF, "kv_connector_metadata"),
    "on_new_request": (_SELF, "request"),
    "register_kv_caches": (_SELF, "kv_caches"),
    "reset_cache": (_SELF,),
    "request_finished": (_SELF, "request", "block_ids"),
    "save_kv_layer": (_SELF, "layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "set_xfer_handshake_metadata": (_SELF, "metadata"),
    "set_xfer_handshake_metadata_pp_aware": (_SELF, "metadata"),
    "shutdown": (_SELF,),
    "start_load_kv": (_SELF, "forward_context", "kwargs"),
    "take_events": (_SELF,),
    "update_connector_output": (_SELF, "connector_output"),
    "update_state_after_alloc": (_SELF, "request", "blocks", "num_external_tokens"),
    "wait_for_layer_load": (_SELF, "layer_name"),
    "wait_for_save": (_SELF,),
}
"""Methods of this connector that vLLM calls, with the names of their parameters."""


REQUEST = frozenset({"cache_salt", "lora_request", "mm_features", "prompt_embeds"})
"""Fields of a request, besides its tokens, that change its KVCache."""


def why_unknown(version: str, base: Any, request: Any) -> str:
    """Why this vLLM's interface is not known, in one line; empty if it is. `base` is vLLM's class
    of connectors, `request` its class of requests."""
    number = ".".join(version.split(".")[:2])
    if number not in TRIED:
        return f"vLLM {version} is not known: {TRIED_WITH}"
    for name, parameters in METHODS.items():
        found = _parameters(getattr(base, name, None))
        if found != parameters:
            has = f"{name}({', '.join(found)})" if found is not None else f"no {name}"
            text = "in its connectors, which is not known"
            return f"vLLM {version} has {has} {text}: {TRIED_WITH}"
    for name in sorted(getattr(base, "__abstractmethods__", frozenset()) - METHODS.keys()):
        text = f"asks its connectors for {name}, which is not known"
        return f"vLLM {version} {text}: {TRIED_WITH}"
    for name in sorted(REQUEST.difference(_parameters(getattr(request, "__init__", None)) or ())):
        return f"vLLM {version} has requests without {name}, which is not known: {TRIED_WITH}"
    return ""


def _parameters(method: Any) -> tuple[str, ...] | None:
    return tuple(inspect.signature(method).parameters) if callable(method) else None
