"""Tests an instance whose vLLM shares the pool of its host: its reports to the head, and the
requests that wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from moonpool.protocol.block_layout import BlockLayout, block_keys, root_key
from moonpool.protocol.messages import (
    AttemptId,
    AttemptSpec,
    BlocksChanged,
    BlocksSnapshot,
    ForwardedCall,
    PrefillDone,
    PrefillStarted,
    PrefixSource,
    PrefixTakenOver,
    Report,
    ReserveDecode,
    Resync,
    StartDecode,
    StartPrefill,
    TakeOverPrefix,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.scheduler.actions import SendReport
from moonpool.types import BlockKey, FinishReason, InstanceId, Role, SamplingParams, Slo, Token
from moonpool.vllm.actions import (
    AwaitPool,
    EngineOutput,
    PoolChanged,
    PoolJoined,
    PoolLost,
    PoolReady,
    SubmitRequest,
    VllmAction,
)
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.pooled_blocks import PooledBlocks, address_of

LAYOUT = BlockLayout(
    model_fingerprint="vllm m",
    dtype="bfloat16",
    block_tokens=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
PROMPT = tuple(range(10, 23))  # has three blocks and a token
KEYS = tuple(block_keys(PROMPT, 4, root_key(LAYOUT.fingerprint, "")))


def address(name: str) -> PeerAddress:
    return PeerAddress(
        instance_id=InstanceId(name), host_id=name, unix_name="", tcp_host=name, tcp_port=1
    )


def work(name: str) -> AttemptSpec:
    return AttemptSpec(
        attempt_id=AttemptId(name),
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        sampling=SamplingParams(max_tokens=8),
        slo=Slo(ttft_s=1.0, tbt_s=1.0),
        tenant="",
        use_cache=True,
        timeout_s=60.0,
    )


def instance(role: Role = Role.MIXED) -> VllmInstance:
    found = VllmInstance(LAYOUT, 100, role, publishes_events=False, caches=False)
    found.handle(PoolJoined(address("own")), 0.0)
    return found


def reports(actions: list[VllmAction], kind: type[Report]) -> list[Report]:
    return [
        one.report for one in actions if isinstance(one, SendReport) and type(one.report) is kind
    ]


def submitted(actions: list[VllmAction]) -> list[SubmitRequest]:
    return [one for one in actions if isinstance(one, SubmitRequest)]


def test_the_head_hears_of_the_pools_blocks_by_tier() -> None:
    vllm = instance()
    snapshot = BlocksSnapshot(next_sequence=0, keys=KEYS[:1], demoted=KEYS[1:2])
    (changed,) = reports(vllm.handle(PoolChanged(snapshot), 0.0), BlocksChanged)
    assert changed == BlocksChanged(sequence=0, stored=KEYS[:1], demoted=KEYS[1:2])
    (again,) = reports(vllm.handle(Resync(), 0.0), BlocksSnapshot)
    assert again == BlocksSnapshot(next_sequence=1, keys=KEYS[:1], demoted=KEYS[1:2])
    (gone,) = reports(vllm.handle(PoolLost(), 0.0), BlocksChanged)
    assert set(gone.removed) == set(KEYS[:2])  # type: ignore[attr-defined]


def test_a_fetch_goes_before_the_prefill() -> None:
    vllm = instance()
    source = PrefixSource(source=address("far"), num_blocks=2)
    actions = vllm.handle(StartPrefill(attempt=work("a"), fetch=source), 0.0)
    assert actions == [AwaitPool(AttemptId("a"), KEYS[:2], address("far"))]
    vllm.handle(PoolChanged(BlocksSnapshot(next_sequence=0, keys=KEYS[:2])), 0.0)
    actions = vllm.handle(PoolReady(AttemptId("a"), 2), 0.0)
    assert SubmitRequest(work("a"), has_pool=True) in actions
    (started,) = reports(actions, PrefillStarted)
    assert (started.cached_tokens, started.fetched_tokens) == (8, 8)  # type: ignore[attr-defined]


@pytest.mark.parametrize("streams", [False, True])
def test_forwarded_calls_share_the_pool(streams: bool) -> None:
    call = ForwardedCall("/v1/completions", b"{}", is_exact=True, tells_first_token=streams)
    forwarded = replace(work("a"), call=call)
    vllm = instance()
    (ask,) = submitted(vllm.handle(StartPrefill(attempt=forwarded), 0.0))
    assert ask == SubmitRequest(forwarded, has_pool=True)
    vllm = instance()
    source = PrefixSource(source=address("far"), num_blocks=2)
    actions = vllm.handle(StartPrefill(attempt=forwarded, fetch=source), 0.0)
    assert actions == [AwaitPool(AttemptId("a"), KEYS[:2], address("far"))]
    vllm.handle(PoolChanged(BlocksSnapshot(next_sequence=0, keys=KEYS[:2])), 0.0)
    actions = vllm.handle(PoolReady(AttemptId("a"), 2), 0.0)
    assert submitted(actions) == [SubmitRequest(forwarded, has_pool=True)]
    (started,) = reports(actions, PrefillStarted)
    assert isinstance(started, PrefillStarted)
    assert (started.fetched_tokens, started.early) == (8, not streams)


def test_a_prefill_that_waits_for_the_pool_begins_once() -> None:
    vllm = instance()
    vllm.handle(StartPrefill(attempt=work("first")), 0.0)
    source = PrefixSource(source=address("far"), num_blocks=2)
    vllm.handle(StartPrefill(attempt=work("second"), fetch=source), 0.0)
    token = EngineOutput(AttemptId("first"), (Token(token_id=5),))
    assert not reports(vllm.handle(token, 0.0), PrefillStarted)
    assert len(reports(vllm.handle(PoolReady(AttemptId("second"), 2), 0.0), PrefillStarted)) == 1


def test_a_prefill_is_handed_over_once_the_pool_has_it() -> None:
    prefill, decode = instance(Role.PREFILL), instance(Role.DECODE)
    prefill.handle(StartPrefill(attempt=work("a"), target=address("d")), 0.0)
    output = EngineOutput(AttemptId("a"), (Token(token_id=5),), FinishReason.LENGTH)
    actions = prefill.handle(output, 0.0)
    assert AwaitPool(AttemptId("a"), KEYS) in actions
    assert not reports(actions, PrefillDone)
    (done,) = reports(prefill.handle(PoolReady(AttemptId("a"), 3), 0.0), PrefillDone)
    assert isinstance(done, PrefillDone)
    assert address_of(done.handle) == address("own")
    decode.handle(ReserveDecode(attempt=work("a")), 0.0)
    start = StartDecode(attempt_id=AttemptId("a"), token=done.token, handle=done.handle)
    assert decode.handle(start, 0.0) == [AwaitPool(AttemptId("a"), KEYS, address("own"))]
    assert decode.handle(PoolReady(AttemptId("a"), 3), 0.0) == [
        SubmitRequest(work("a"), has_pool=True)
    ]


def test_a_prefix_is_taken_over_into_the_pool() -> None:
    vllm = instance()
    command = TakeOverPrefix(number=4, source=address("far"), keys=KEYS, num_uses=1, timeout_s=1.0)
    (wait,) = vllm.handle(command, 0.0)
    assert isinstance(wait, AwaitPool)
    (taken,) = reports(vllm.handle(PoolReady(wait.attempt_id, 3), 0.0), PrefixTakenOver)
    assert taken == PrefixTakenOver(number=4, num_blocks=3)


def test_a_request_that_ended_waits_for_nothing() -> None:
    vllm = instance()
    source = PrefixSource(source=address("far"), num_blocks=2)
    vllm.handle(StartPrefill(attempt=work("a"), fetch=source), 0.0)
    vllm.abort_all()
    assert vllm.handle(PoolReady(AttemptId("a"), 2), 0.0) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("dsrv-")), max_size=40))
def test_the_head_knows_what_is_reachable(steps: list[tuple[int, str]]) -> None:
    """The sum of all reports must be right, whatever changes in the pool and in vLLM."""
    pool, cached = PooledBlocks(address("own")), set[BlockKey]()
    told: dict[BlockKey, str] = {}
    truth: dict[BlockKey, str] = {}
    for number, kind in steps:
        key = BlockKey(number.to_bytes(16, "little"))
        gained: list[BlockKey] = []
        lost: list[BlockKey] = []
        if kind == "v" and key not in cached:
            cached.add(key)
            gained.append(key)
        elif kind == "-" and key in cached:
            cached.discard(key)
            lost.append(key)
        elif kind == "d":
            truth[key] = "dram"
            pool.hear(BlocksChanged(sequence=0, stored=(key,)))
        elif kind == "s":
            truth[key] = "ssd"
            pool.hear(BlocksChanged(sequence=0, demoted=(key,)))
        elif kind == "r":
            truth.pop(key, None)
            pool.hear(BlocksChanged(sequence=0, removed=(key,)))
        report = pool.changes(gained, lost, cached.__contains__, 0)
        if report is not None:
            told.update(dict.fromkeys(report.stored, "dram"))
            told.update(dict.fromkeys(report.demoted, "ssd"))
            for gone in report.removed:
                del told[gone]
        assert told == truth | dict.fromkeys(cached, "dram")
