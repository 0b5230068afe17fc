"""Tests the counters of instances, and the counters that change when instances end or return: these
must change, and no other counter."""

from __future__ import annotations

import pytest
from metric_moves import (
    TIME,
    grown,
    same,
    says,
)
from played_head import (
    NAME,
    PlayedCluster,
    PlayedInstance,
)

from moonpool.conductor.actions import Tick
from moonpool.protocol.messages import AttemptId, CacheView, InstanceLoad, TransferDone
from moonpool.types import InstanceId, Role


def test_counters_of_heartbeats() -> None:
    async def act(cluster: PlayedCluster) -> None:
        cluster.instance.beat(
            step_s=1.5,
            preemptions=2,
            corrupt_slices=3,
            ssd_damaged_blocks=4,
            ssd_failed_operations=5,
            recomputed_tokens=6,
            tcp_received_bytes=7,
            ssd_written_bytes=8,
            ssd_read_seconds=0.5,
            used_prefetched_blocks=9,
            drafts=10,
            draft_tokens=20,
            accepted_draft_tokens=15,
            step_tokens_le_8=2,
            step_tokens_sum=9,
            attempt_preemptions_le_1=1,
            attempt_preemptions_sum=1,
            of_a_later_release=99,
        )

    same(
        grown(act, says("")),
        {
            "moonpool:step_seconds_total{role=mixed}": TIME,
            "vllm:num_preemptions_total": 2.0,
            "moonpool:corrupt_slices_total": 3.0,
            "moonpool:damaged_ssd_blocks_total": 4.0,
            "moonpool:ssd_failures_total": 5.0,
            "moonpool:recomputed_tokens_total": 6.0,
            "moonpool:transfer_bytes_total{transport=tcp}": 7.0,
            "moonpool:ssd_bytes_total{direction=written}": 8.0,
            "moonpool:ssd_seconds_total{direction=read}": TIME,
            "moonpool:prefetched_blocks_total{state=used}": 9.0,
            "vllm:spec_decode_num_drafts_total": 10.0,
            "vllm:spec_decode_num_draft_tokens_total": 20.0,
            "vllm:spec_decode_num_accepted_tokens_total": 15.0,
            "vllm:iteration_tokens_total_count": 2.0,
            "vllm:iteration_tokens_total_sum": 9.0,
            "vllm:request_num_preemptions_count": 1.0,
            "vllm:request_num_preemptions_sum": 1.0,
        },
    )


def test_an_instance_that_dies_and_comes_back() -> None:
    """The instance's counters begin again at 0. The head must not count its earlier counts
    twice."""

    async def act(cluster: PlayedCluster) -> None:
        cluster.instance.beat(corrupt_slices=3)
        cluster.instance.lose()
        again = PlayedInstance(cluster.head, says(""), incarnation=2)
        again.join()
        again.beat(corrupt_slices=1)
        again.beat(corrupt_slices=2)

    same(
        grown(act, says("")),
        {
            "moonpool:corrupt_slices_total": 5.0,
            f"moonpool:instance_losses_total{{instance_id={NAME}}}": 1.0,
            f"moonpool:instance_restarts_total{{instance_id={NAME}}}": 1.0,
        },
    )


def test_a_connection_that_breaks() -> None:
    """The same process joins again, and its counters continue."""

    async def act(cluster: PlayedCluster) -> None:
        cluster.instance.beat(corrupt_slices=3, step_s=7.0)
        cluster.instance.lose("the connection broke")
        again = PlayedInstance(cluster.head, says(""), incarnation=1)
        again.join()
        again.beat(corrupt_slices=4, step_s=7.0)

    expected = {
        "moonpool:corrupt_slices_total": 4.0,
        "moonpool:step_seconds_total{role=mixed}": TIME,
        f"moonpool:instance_losses_total{{instance_id={NAME}}}": 1.0,
    }
    same(grown(act, says("")), expected)


def test_an_instance_that_an_earlier_head_had() -> None:
    """The head must leave out the counts of a process that an earlier head had, and add those of a
    new process."""

    async def act(cluster: PlayedCluster) -> None:
        name = InstanceId("m7")
        await cluster.head.expect({name: Role.MIXED}, {})
        old = PlayedInstance(cluster.head, says(""), name=name)
        old.join()
        old.beat(corrupt_slices=16)
        old.beat(corrupt_slices=18)
        new = PlayedInstance(cluster.head, says(""), name=InstanceId("m8"))
        new.join()
        new.beat(corrupt_slices=1)

    same(grown(act, says("")), {"moonpool:corrupt_slices_total": 3.0})


def test_what_is_believed_of_the_cache_of_a_vllm_server() -> None:
    async def act(cluster: PlayedCluster) -> None:
        view = CacheView("distrusted", "no events", 9, 5, 8, 4)
        cluster.instance.report(InstanceLoad(0, 0, 0, 0, 64, {}, {}, cache_view=view))
        source = "moonpool:engine_cache_source", f"instance_id={NAME},source=distrusted"
        assert cluster.samples()[source] == 1

    same(
        grown(act, says("")),
        {
            f"moonpool:engine_prompt_tokens_total{{instance_id={NAME}}}": 9.0,
            f"moonpool:engine_expected_hits_total{{instance_id={NAME}}}": 5.0,
            f"moonpool:engine_prefix_cache_queries_total{{instance_id={NAME}}}": 8.0,
            f"moonpool:engine_prefix_cache_hits_total{{instance_id={NAME}}}": 4.0,
        },
    )


@pytest.mark.parametrize("returns", [False, True], ids=["drain", "upgrade"])
def test_an_instance_that_leaves_in_order(returns: bool) -> None:
    async def act(cluster: PlayedCluster) -> None:
        PlayedInstance(cluster.head, says(""), name=InstanceId("m1")).join()
        assert not cluster.head.drain(NAME, 0.0, returns)
        cluster.instance.lose()
        if returns:
            PlayedInstance(cluster.head, says(""), incarnation=2).join()

    restarts = {f"moonpool:instance_restarts_total{{instance_id={NAME}}}": 1.0}
    same(grown(act, says("")), restarts if returns else {})


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_switch_of_a_role(is_lost: bool) -> None:
    """During the switch, the answer ends, or its instance is lost."""

    async def act(cluster: PlayedCluster) -> None:
        head, name = cluster.head, InstanceId("d1")
        others = {"p0": Role.PREFILL, "d0": Role.DECODE}
        for other, role in others.items():
            PlayedInstance(head, says(""), name=InstanceId(other), role=role).join()
        switching = PlayedInstance(head, says(""), name=name, role=Role.DECODE)
        switching.join()
        cluster.conductor.roles.begin(name, Role.PREFILL, "a test", head.now())
        assert cluster.samples()["moonpool:draining_instances", ""] == 1
        if is_lost:
            switching.lose()
        head._post(Tick())

    switched = {"moonpool:role_switches_total{role=prefill}": 1.0}
    given_up = {
        "moonpool:role_switches_given_up_total": 1.0,
        "moonpool:instance_losses_total{instance_id=d1}": 1.0,
    }
    same(grown(act, says("")), given_up if is_lost else switched)


@pytest.mark.parametrize("error", ["", "it broke"])
def test_a_transfer(error: str) -> None:
    async def act(cluster: PlayedCluster) -> None:
        done = TransferDone(AttemptId("r/1"), 100, 0.5, corrupt_slices=0, error=error)
        cluster.instance.report(done)

    outcome = "broken" if error else "whole"
    expected = {
        f"moonpool:transfers_total{{outcome={outcome}}}": 1.0,
        "moonpool:transfer_seconds_total": TIME,
    }
    same(grown(act, says("")), expected)
