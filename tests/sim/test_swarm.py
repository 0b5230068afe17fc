"""Hundreds of seeded runs of the whole pure core, and proof that they notice planted defects."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moonpool.conductor.request_lifecycle import RequestLifecycle
from moonpool.conductor.reservations import Reservations
from moonpool.conductor.state import TrackedRequest
from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.prefix_index import PrefixIndex
from moonpool.scheduler import kv_cache_manager
from moonpool.scheduler.attempt_lifecycle import AttemptLifecycle
from moonpool.scheduler.layerwise_overlap import LayerwiseOverlap
from moonpool.scheduler.request_state import RequestState
from moonpool.scheduler.scheduler import Scheduler
from tests.sim.swarm import SeedFailed, run_seed

SEEDS_PER_TEST = 50
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in range(SEEDS_PER_TEST, 150, SEEDS_PER_TEST)
        ),
    ],
)
def test_invariants_hold(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        world = run_seed(seed)  # its own checks raise SeedFailed, with seed and options
        assert world.lost_with_head | set(world.ended) == set(world.truths)


@pytest.mark.parametrize("seed", [20542, 90613, 91821, 771299])
def test_seeds_that_failed_once(seed: int) -> None:
    """20542: the pool took an owner's blocks of two prompts for one prompt, whose links formed a
    cycle, so that the list of the hottest prefixes never ended. 91821: two requests fitted together
    by their tokens, but not by their blocks. 771299: a spare block that the policy did not evict
    lost its mark."""
    assert run_seed(seed).ended


CORNERS = {
    "FetchBlocks",
    "early steps",
    "early steps by load",
    "missed shares",
    "StoreBlocks",
    "LoadBlocks",
    "hung disks",
    "StopReceiving",
    "SwitchRole",
    "role is a ",
    "role was lost ",
    "CancelStream",
    "AbortStream",
    "StepFailed",
    "InstanceLost",
    "counter preemptions",
    "counter corrupt_blocks",
    "counter failed_streams",
    "outcome stop",
    "outcome length",
    "outcome abort",
    "outcome deadline",
    "outcome tbt_slo_late",
    "outcome decode_load",
    "outcome decode_load_predicted",
    "outcome ttft_slo",
    "outcome no_decode_capacity",
}


@pytest.mark.long
def test_runs_reach_every_corner() -> None:
    """Runs that never preempt, fetch or break a stream prove nothing about these cases. The rarest
    cases occur once in some hundred runs."""
    seen: Counter[str] = Counter()
    for seed in range(1000, 2000):
        seen += run_seed(seed).seen
        if seen.keys() >= CORNERS:
            break
    assert not CORNERS - seen.keys()
    assert seen["outcome length"] + seen["outcome stop"] > seen["RequestArrived"] / 2


def test_equal_seeds_give_equal_runs() -> None:
    """Nothing may depend on the order of a set, or a run could not be repeated."""
    program = (
        "from tests.sim.swarm import run_seed; print([run_seed(s).fingerprint for s in (3, 8)])"
    )
    prints = set()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        prints.add(run.stdout)
    assert len(prints) == 1


def _free_at_once(self: AttemptLifecycle, request: RequestState) -> None:
    self._pool.release(request.owner)
    self._pool.release(request.fetch_owner)
    del self._requests[request.attempt_id]


def _ignore_corruption(original: Callable[..., None]) -> Callable[..., None]:
    def defective(self: AttemptLifecycle, event: object) -> None:
        original(self, msgspec.structs.replace(event, corrupt=()))

    return defective


def _collide(original: Callable[..., bool]) -> Callable[..., bool]:
    def defective(self: BlockPool, block_id: int, key: bytes, depth: int) -> bool:
        return original(self, block_id, key[:1] * 16, depth)

    return defective


def _forget_delivered(original: Callable[..., None]) -> Callable[..., None]:
    def defective(self: RequestLifecycle, tracked: TrackedRequest, *rest: object) -> None:
        original(self, tracked, *rest)
        tracked.generated.clear()

    return defective


def _use_what_was_missed(original: Callable[..., bool]) -> Callable[..., bool]:
    def defective(self: LayerwiseOverlap, request: RequestState, missed: bool) -> bool:
        original(self, request, missed)
        return True

    return defective


DEFECTS: dict[str, tuple[object, str, object]] = {
    "blocks freed under a transfer": (AttemptLifecycle, "_release_if_idle", _free_at_once),
    "corrupt blocks used": (
        AttemptLifecycle,
        "on_receive_ended",
        _ignore_corruption(AttemptLifecycle.on_receive_ended),
    ),
    "keys that collide": (BlockPool, "cache_block", _collide(BlockPool.cache_block)),
    "tenants share": (kv_cache_manager, "root_key", lambda fingerprint, tenant: b"r" * 16),
    "blocks that never arrived used": (
        LayerwiseOverlap,
        "on_step_ended",
        _use_what_was_missed(LayerwiseOverlap.on_step_ended),
    ),
    "broken streams not reported": (
        AttemptLifecycle,
        "on_stop_receiving",
        lambda self, command: None,
    ),
    "aborts forgotten": (AttemptLifecycle, "on_abort", lambda self, command: None),
    "events ignored": (
        PrefixIndex,
        "apply",
        lambda self, instance_id, incarnation, sequence, stored, removed: True,
    ),
    "preempted request resumes": (
        Scheduler,
        "_preempt",
        lambda self, request: (self.running.remove(request), self.waiting.append(request)),
    ),
    "retries start over": (
        RequestLifecycle,
        "_deliver",
        _forget_delivered(RequestLifecycle._deliver),
    ),
    "reservations never end": (
        Reservations,
        "end_prefill",
        lambda self, tracked, attempt, now: None,
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, defect = DEFECTS[name]
    monkeypatch.setattr(owner, attribute, defect)
    with pytest.raises(SeedFailed):
        _run_seeds(range(1500))


def _run_seeds(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed)
