"""Defines the smallest connector that proves vLLM's layout, with and without planted faults. Each
outcome is a line of JSON in the file MOONPOOL_TEST_OUTCOMES."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from moonpool_engine.vllm.cache_layout import CacheLayout, LayoutRefused
from moonpool_engine.vllm.layout_probe import proven_layout
from moonpool_engine.vllm.worker_steps import attention_backends, find_worker
from tests.live.vllm_layout.faults import LAYOUTS, MOVERS, mover_of


class Nothing(KVConnectorMetadata):
    """Loads no block."""


class LayoutConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves no block."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._caches: dict[str, Any] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches
        if os.environ.get("MOONPOOL_TEST_EARLY"):
            self._outcome("early")

    def get_handshake_metadata(self) -> None:
        """Runs the proof, because this is the first call after vLLM's warm-up. vLLM asks all ranks
        together."""
        planted = os.environ.get("MOONPOOL_TEST_FAULTS", "")
        faults = [*MOVERS, *LAYOUTS, "nothing copied"] if planted == "all" else []
        for fault in ["", *faults, ""] if faults else [""]:
            self._outcome(fault)

    def _outcome(self, fault: str) -> None:
        begin = time.monotonic()
        line: dict[str, Any] = {"fault": fault, "refused": None}
        try:
            layout = CacheLayout.of(self._caches, self._kv_cache_config)
            group = layout.groups[0]
            tensor = self._caches[group.layers[0]]
            line |= {
                "groups": [
                    [g.kind, g.block_tokens, g.window_tokens, len(g.layers), g.num_slices]
                    for g in layout.groups
                ],
                "slice_bytes": layout.slice_bytes,
                "num_blocks": layout.num_blocks,
                "shape": list(tensor.shape),
                "strides": list(tensor.stride()),
                "dtype": str(tensor.dtype),
                "fingerprint": layout.fingerprint().hex()[:16],
            }
            form = {"heads": tensor.shape[1], "tokens": tensor.shape[2], "slices": group.num_slices}
            change = LAYOUTS.get(fault, lambda layout: layout)
            worker = find_worker()
            line["rank"] = worker.rank
            line["backends"] = attention_backends(worker)
            proven_layout(
                worker,
                self._caches,
                self._kv_cache_config,
                mover_of(fault, form),
                lambda *of: change(CacheLayout.of(*of)),
            )
        except LayoutRefused as error:
            line["refused"] = str(error)
        line["seconds"] = round(time.monotonic() - begin, 2)
        clean = not any(t.float().abs().max() for t in self._caches.values())
        line["clean"] = bool(clean)
        with Path(os.environ["MOONPOOL_TEST_OUTCOMES"]).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def start_load_kv(self, forward_context: Any, **others: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *_: Any, **others: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Nothing:
        return Nothing()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None
