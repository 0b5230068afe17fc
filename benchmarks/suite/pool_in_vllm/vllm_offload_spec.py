"""Runs under a vLLM's Python, not ours: lets vLLM's own offloading run where its device is a CPU.

vLLM's `CPUOffloadingSpec` refuses a CPU, as its copies need CUDA. Keys, chunks, eviction and
scheduling are vLLM's; this module replaces only the copies. `spec_module_path` of the
`OffloadingConnector` names this module. It stands alone: it imports nothing of moonpool.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole blocks at once: a CPU's forward pass has ended when a transfer is submitted."""

    def __init__(self, kv_caches: Any, num_chunks: int) -> None:
        sizes = [cache.page_size_bytes for cache in kv_caches.tensors]
        self._engine = [
            cache.tensor.view(torch.int8).view(-1, size)
            for cache, size in zip(kv_caches.tensors, sizes, strict=True)
        ]
        self._kept = [torch.zeros((num_chunks, size), dtype=torch.int8) for size in sizes]
        self._ended: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._engine, src_spec, self._kept, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._kept, src_spec, self._engine, dst_spec)

    def get_finished(self) -> list[Any]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Returns immediately: each transfer ends when it is submitted."""

    def _copy(self, job_id: int, sources: Any, source: Any, targets: Any, target: Any) -> bool:
        began_s = time.monotonic()
        source_ids = torch.as_tensor(source.block_ids, dtype=torch.long)
        target_ids = torch.as_tensor(target.block_ids, dtype=torch.long)
        num_bytes = 0
        for here, there in zip(sources, targets, strict=True):
            there[target_ids] = here[source_ids]
            num_bytes += len(source_ids) * here.shape[1]
        self._ended.append(TransferResult(job_id, True, num_bytes, time.monotonic() - began_s))
        return True


class HostCopySpec(CPUOffloadingSpec):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._copier: HostCopyWorker | None = None

    def get_worker(self, kv_caches: Any) -> HostCopyWorker:
        if self.blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
            raise ValueError("this copies blocks of one group, as large as vLLM's own")
        if self._copier is None:
            self._copier = HostCopyWorker(kv_caches, self.num_chunks)
        return self._copier
