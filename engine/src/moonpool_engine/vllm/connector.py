"""`MoonpoolConnector`: the KVCache pool of this host inside vLLM, by vLLM's own interface.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "MoonpoolConnector",
        "kv_connector_module_path": "moonpool.vllm_connector", "kv_role": "kv_both"}'

vLLM makes one connector in its scheduler (`SchedulerSide`) and one in each worker (`WorkerSide`).
A failure here costs hits, and no answer: vLLM then serves without the pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from moonpool.host_pool.messages import PROTOCOL, AttachRank
from moonpool.host_pool.places import default_socket
from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.vllm.adapters import Adapters
from moonpool_engine.vllm.block_copier import DeviceSliceMover, open_copier
from moonpool_engine.vllm.block_kinds import BlockKind, kinds_of, windows_of
from moonpool_engine.vllm.cache_layout import CacheLayout, LayoutRefused
from moonpool_engine.vllm.layout_probe import proven_layout
from moonpool_engine.vllm.model_identity import (
    UnknownModelError,
    adapter_settings_of,
    group_of,
    hash_folder,
    model_folder,
    settings_of,
)
from moonpool_engine.vllm.pool_start import start_in_background
from moonpool_engine.vllm.ranks import agreed, of_all_stages
from moonpool_engine.vllm.scheduler_side import SchedulerSide
from moonpool_engine.vllm.slice_mover import open_mover
from moonpool_engine.vllm.space_client import SpaceClient
from moonpool_engine.vllm.transfers import BlockTable, RankReady, StepTransfers, TransfersEnded
from moonpool_engine.vllm.worker_side import WorkerSide
from moonpool_engine.vllm.worker_steps import attention_backends, find_worker

log = logging.getLogger("moonpool.vllm_connector")

KVConnectorMetadata.register(StepTransfers)
KVConnectorWorkerMetadata.register(TransfersEnded)
KVConnectorHandshakeMetadata.register(RankReady)


OTHERWISE = (AttributeError, KeyError, IndexError, TypeError, ValueError)
"""Errors that are raised if an object of vLLM differs from what the connector expects."""


class MoonpoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both sides of the connector; `role` tells which side an object is. Settings in
    `kv_connector_extra_config`:

    pool        the pool's unix socket; by default where `moonpool pool serve` opens it
    start_pool  true: starts the pool of this host if there is none, with these settings of
                `moonpool pool serve`: dram, ssd, folder, models, memory_folder, host
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _follow_vllm_logs()
        self._refusal = ""
        self._pool_path, self._block_tokens = default_socket(), 1
        settings, starts_pool = dict[str, Any](), False
        try:
            transfer = vllm_config.kv_transfer_config
            # A block that did not arrive is computed: nothing fails because of the cache.
            transfer.kv_load_failure_policy = "recompute"
            settings = dict(transfer.kv_connector_extra_config)
            named, starts_pool = settings.pop("pool", None), settings.pop("start_pool", False)
            self._pool_path = Path(named).absolute() if named else self._pool_path
            self._block_tokens = int(vllm_config.cache_config.block_size)
        except OTHERWISE as error:
            self._refusal = _otherwise("its configuration", error)
        self._kv_cache_config = kv_cache_config
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        if role is KVConnectorRole.SCHEDULER:
            if starts_pool and not self._refusal:
                start_in_background(self._pool_path, settings)
            adapters = Adapters(adapter_settings_of(vllm_config))
            self._scheduler = SchedulerSide(
                self._pool_path, self._block_tokens, time.monotonic, adapters
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not stored is a later miss

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches
        if not isinstance(kv_caches, dict):
            self._refusal = _otherwise("its KVCache", TypeError(f"a {type(kv_caches).__name__}"))

    def unregister_kv_caches(self) -> None:
        """Called when vLLM is about to sleep (from 0.33 on), because the memory of its KVCache goes
        away."""
        if self._worker is not None:
            self._worker.end_stores()

    def get_handshake_metadata(self) -> RankReady | None:
        """vLLM calls this on all ranks together, after warm-up and before its first request, so the
        layout can be proven and the pool joined."""
        rank, num_ranks = 0, 1
        try:
            parallel = self._vllm_config.parallel_config
            rank = int(parallel.rank)
            num_ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
            return self._join(rank, num_ranks)
        except (LayoutRefused, UnknownModelError) as error:
            refusal = str(error)
        except Exception as error:  # vLLM can serve without the pool, whatever the error was
            refusal = _otherwise("its worker", error)
        # the scheduler's side logs the reason
        log.debug("rank %d uses no KVCache pool: %s", rank, refusal)
        return RankReady(b"", rank, num_ranks, refusal)

    def _join(self, rank: int, num_ranks: int) -> RankReady:
        """Proves the layout and joins the pool. Collective. Raises LayoutRefused, and others where
        vLLM's objects are not as they were."""
        if self._refusal:  # all ranks have the same reason
            raise LayoutRefused(self._refusal)
        asleep = getattr(self._vllm_config.model_config, "enable_sleep_mode", False)
        if asleep and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            raise LayoutRefused("sleep mode needs vLLM 0.33, which tells connectors of it")
        worker, mover = find_worker(), open_mover()
        tensors = {  # a recurrent layer has several, and is refused with the layout
            name: one for name, one in self._kv_caches.items() if isinstance(one, torch.Tensor)
        }
        on_host = all(one.device.type == "cpu" for one in tensors.values())
        proof = mover if on_host else DeviceSliceMover(tensors)
        layout = proven_layout(worker, self._kv_caches, self._kv_cache_config, proof)
        kinds: list[BlockKind] = []
        agreed(lambda: kinds.extend(kinds_of(layout)))
        group = self._group_of(layout, attention_backends(worker), num_ranks)
        spaces = []
        for kind in kinds:
            attach = self._attach_of(layout, kind, group, rank * len(kinds), num_ranks * len(kinds))
            copier = open_copier(layout, kind, mover, self._kv_caches)
            spaces.append(SpaceClient(self._pool_path, attach, layout, kind, copier))
        self._worker = WorkerSide(spaces)
        return RankReady(group, rank, num_ranks, "", windows_of(layout.groups))

    def _group_of(self, layout: CacheLayout, backends: dict[str, str], num_ranks: int) -> bytes:
        """The pool's name for the model in this layout. Collective. Raises UnknownModelError."""
        own = layout.fingerprint(0, num_ranks, backends, vllm.__version__)
        forms = of_all_stages(own)
        weights = hash_folder(model_folder(self._vllm_config))
        block_tokens = layout.groups[0].block_tokens
        settings = settings_of(self._vllm_config, block_tokens, vllm.__version__)
        return group_of(weights, settings, " ".join(form.hex() for form in forms))

    def _attach_of(
        self, layout: CacheLayout, kind: BlockKind, group: bytes, first_rank: int, num_ranks: int
    ) -> AttachRank:
        """Returns the message by which this process attaches one of its kinds of KVCache to the
        pool."""
        rank = first_rank + kind.index
        nominal = BlockLayout(
            model_fingerprint=f"{group.hex()} {rank}",  # no rank reads the blocks of another rank
            dtype="bfloat16",
            block_tokens=1,
            num_layers=kind.num_slices,
            num_kv_heads=1,
            head_dim=layout.slice_bytes // 4,  # K and V of two bytes each
            inner="vllm",
        )
        return AttachRank(
            protocol=PROTOCOL,
            group=group,
            model=str(self._vllm_config.model_config.model),
            rank=rank,
            num_ranks=num_ranks,
            block_tokens=kind.groups[0].block_tokens,
            layout=nominal,
            window_blocks=kind.window_blocks,
        )

    def handle_preemptions(self, kv_connector_metadata: StepTransfers) -> None:
        if self._worker is not None:
            self._worker.preempt(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin_step(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing, because the blocks that a step reads were loaded before the step."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing, because blocks are stored in the next step, when their tokens are final."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        stored = self._worker.take_finished(self._step().has_work)
        loaded, failed = self._worker.take_loaded()
        return KVConnectorTransferResults(
            finished_sending=stored, finished_recving=loaded, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> TransfersEnded | None:
        return None if self._worker is None else self._worker.take_ended()

    def _step(self) -> StepTransfers:
        step = self._get_connector_metadata()
        assert isinstance(step, StepTransfers)
        return step

    # Scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._begin([metadata[rank] for rank in sorted(metadata)])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._begin([metadata[rank] for rank in sorted(metadata)])

    def _begin(self, ready: list[RankReady]) -> None:
        if self._scheduler is None:
            return
        manager = getattr(self, "_kv_cache_manager", None)
        if self._refusal or manager is None or not all(isinstance(r, RankReady) for r in ready):
            reason = self._refusal or "this vLLM tells its scheduler's connector otherwise"
            log.error("vLLM serves without the KVCache pool: %s", reason)
            return
        self._scheduler.begin(ready, getattr(manager, "block_pool", None))

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            try:
                self._scheduler.on_new_request(request)
            except OTHERWISE as error:
                self._scheduler.leave_pool(_otherwise("a request", error))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        try:
            found = self._scheduler.matched_tokens(request, num_computed_tokens)
        except OTHERWISE as error:
            self._scheduler.leave_pool(_otherwise("a request", error))
            return 0, False
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        table = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.on_allocated(request, table, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        assert self._scheduler is not None
        ssd = min(self._scheduler.ssd_tokens(request), num_external_tokens)
        sources = {CacheHitSource.DISK: ssd, CacheHitSource.HOST: num_external_tokens - ssd}
        return {source: count for source, count in sources.items() if count}

    def build_connector_meta(self, scheduler_output: Any) -> StepTransfers:
        assert self._scheduler is not None
        return self._scheduler.build(scheduler_output, self._table_of)

    def _table_of(self, req_id: str) -> BlockTable:
        assert self._kv_cache_manager is not None
        table: BlockTable = self._kv_cache_manager.get_block_ids(req_id)
        return table

    def update_connector_output(self, connector_output: Any) -> None:
        ended = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(ended, TransfersEnded):
            self._scheduler.on_ended(ended)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.on_finished(request, block_ids), None

    def reset_cache(self) -> bool:
        if self._scheduler is not None:
            self._scheduler.leave_pool("vLLM's caches were reset, so its weights may be others")
        return True

    def take_events(self) -> Iterable[Any]:
        return ()


def _otherwise(what: str, error: Exception) -> str:
    said = " ".join(str(error).split())[:200]
    return f"this vLLM describes {what} otherwise: {type(error).__name__}: {said}"


def _follow_vllm_logs() -> None:
    """Makes vLLM's log show the messages of this package."""
    ours, theirs = logging.getLogger("moonpool"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level or logging.INFO)
        ours.propagate = False
