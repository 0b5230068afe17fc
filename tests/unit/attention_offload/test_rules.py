"""Tests that with windows, caps, sinks, latents and fp8, attention workers give the tokens of one
engine, bit for bit."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BlockId, InstanceId, SamplingParams
from moonpool_engine.attention_offload.channel import (
    AttentionChannel,
    AttentionChannelError,
    SocketChannel,
    offer_rings,
    rings_available,
    take_rings,
)
from moonpool_engine.attention_offload.client import AttachOptions
from moonpool_engine.attention_offload.partition import WorkerBlockRanges, share_heads
from moonpool_engine.attention_offload.remote_ops import RemoteOps
from moonpool_engine.attention_offload.wire import ENCODER, OPENING, Attach, KvHeadRange, LayerRule
from moonpool_engine.attention_offload.worker_state import AttachError, AttentionWorkerState
from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.layers import attend_rules
from moonpool_engine.engine.model import head_shape
from moonpool_engine.engine.ops import SEGMENT, KvCache, block_dtype, empty_cache
from moonpool_engine.engine.runner import Engine, choose_split_ops, make_layout
from moonpool_engine.transfer.arena import Arena
from tests.differential.checkpoints import CASES, save

BLOCK = 64
EACH = 40
GREEDY = SamplingParams(temperature=0.0)
WITH_RULES = ["mistral-window", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "smollm3-window"]


def opened(name: str, folder: Path, dtype: str, kv_dtype: str = "auto") -> LoadedModel:
    save(
        replace(CASES[name], changes={**CASES[name].changes, "max_position_embeddings": 8192}),
        folder,
    )
    return replace(open_model(str(folder), dtype), kv_dtype=kv_dtype)


def attach_options(model: LoadedModel, heads: KvHeadRange | None) -> AttachOptions:
    return AttachOptions(
        owner=InstanceId("decode-0"),
        layout=make_layout(model, BLOCK, choose_split_ops()),
        heads=head_shape(model.spec),
        scale=model.spec.scale(),
        rules=tuple(LayerRule.of(rule) for rule in attend_rules(model.spec, model.weights)),
        num_blocks=EACH,
        threads=1,
        ring_bytes=1 << 16,
        kv_heads=heads,
    )


def over_the_wire(options: AttachOptions) -> Attach:
    found = OPENING.decode(ENCODER.encode(options.attach("")))
    assert isinstance(found, Attach)
    return found


def new_state() -> AttentionWorkerState:
    name = InstanceId("attention-0")
    return AttentionWorkerState(name, b"secret", choose_split_ops(), Arena, "127.0.0.1", False)


@contextmanager
def offloaded(model: LoadedModel, count: int, rings: bool, by_head: bool) -> Iterator[Engine]:
    """Yields an engine whose blocks are at workers, which were attached by messages."""
    ranges = share_heads(model.spec.num_kv_heads, count) if by_head else ()
    channels: list[AttentionChannel] = []
    threads, states = [], []
    for number in range(count):
        state = new_state()
        states.append(state)
        state.attach(
            over_the_wire(attach_options(model, ranges[number] if by_head else None)), print
        )
        executor = state.executor()
        assert executor is not None
        ours, theirs = socket.socketpair()
        if rings:
            channels.append(offer_rings(ours, 1 << 16, 10.0, 0.0))
            far: AttentionChannel = take_rings(theirs, None, 0.0)
        else:
            channels.append(SocketChannel(ours, 10.0, reads_ahead=True))
            far = SocketChannel(theirs, None)

        def serve(executor=executor, far=far) -> None:  # type: ignore[no-untyped-def]
            with pytest.raises(AttentionChannelError):
                executor.serve(far)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
    sizes = (EACH,) if by_head else (EACH,) * count
    ops = RemoteOps(choose_split_ops(), channels, WorkerBlockRanges(sizes), head_ranges=ranges)
    layout = make_layout(model, BLOCK, choose_split_ops())
    shape = (sum(sizes), layout.num_layers, layout.slice_elements)
    nothing = torch.empty(1, 1, 1, dtype=block_dtype(layout)).expand(shape)
    try:
        yield Engine(model, ops, KvCache(nothing, layout))
    finally:
        for channel in channels:
            channel.close()
        for thread in threads:
            thread.join(60)
        for state in states:
            state.close()


def tokens_of(engine: Engine, table: list[int], length: int) -> list[int]:
    """Runs a prompt in three chunks, then five decodes in steps with another request's decodes."""
    text = random.Random(length).choices(range(3, 290), k=length)
    name, blocks = AttemptId("0"), [BlockId(b) for b in table]
    for start, end in ((0, length // 3), (length // 3, length - 7)):
        engine.step([StepEntry(name, text[start:end], start, blocks, None)])
    text += [_drawn(engine.step([StepEntry(name, text[-7:], length - 7, blocks, GREEDY)]))]
    for _ in range(5):
        entry = StepEntry(name, text[-1:], len(text) - 1, blocks, GREEDY)
        beside = StepEntry(AttemptId("1"), [5, 6, 7], 0, [BlockId(EACH - 1)], GREEDY)
        text.append(_drawn(engine.step([entry, beside])))
    return text[length:]


def _drawn(result) -> int:  # type: ignore[no-untyped-def]
    return int(result.tokens[0].token_id)


def check(model: LoadedModel, rings: bool, by_head: bool = False) -> None:
    if rings and not rings_available():
        pytest.skip("no native kernels")
    layout = make_layout(model, BLOCK, choose_split_ops())
    alone = Engine(model, choose_split_ops(), empty_cache(layout, 2 * EACH))
    size = SEGMENT // BLOCK
    lies = [(list(range(6)), 300)]
    # The second sequence is at the second worker, and the third has a segment at each.
    if not by_head:
        lies += [(list(range(EACH, EACH + 6)), 300)]
        lies += [([*range(size), *range(EACH, EACH + 8)], SEGMENT + 200)]
    with offloaded(model, 2, rings, by_head) as engine:
        for table, length in lies:
            assert tokens_of(engine, table, length) == tokens_of(alone, table, length)


@pytest.mark.long
@pytest.mark.parametrize("rings", [False, True], ids=["socket", "rings"])
@pytest.mark.parametrize("name", WITH_RULES)
def test_by_request_and_by_segment(name: str, rings: bool, tmp_path: Path) -> None:
    check(opened(name, tmp_path, "float32"), rings)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v2", "gemma3"])
def test_in_bfloat16(name: str, tmp_path: Path) -> None:
    check(opened(name, tmp_path, "bfloat16"), rings=True)


@pytest.mark.parametrize("rings", [False, True], ids=["socket", "rings"])
@pytest.mark.parametrize("name", ["gpt-oss", "gemma2"])
def test_by_head(name: str, rings: bool, tmp_path: Path) -> None:
    check(opened(name, tmp_path, "float32"), rings, by_head=True)


@pytest.mark.parametrize("by_head", [False, True], ids=["by request", "by head"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek-v3"])
def test_kvcache_in_fp8(name: str, by_head: bool, tmp_path: Path) -> None:
    if by_head and name == "deepseek-v3":
        pytest.skip("one KV head is not shared out")
    check(opened(name, tmp_path, "float32", "fp8"), rings=True, by_head=by_head)


def test_what_crosses_is_the_latent(tmp_path: Path) -> None:
    """Uses latents: each token has one key of latent and rotated elements, without values and
    heads."""
    model = opened("deepseek-v3", tmp_path, "float32")
    heads = head_shape(model.spec)
    assert (heads.stored_heads, heads.head_dim, heads.latent_dim) == (1, 48 + 16, 48)
    layout = make_layout(model, BLOCK, choose_split_ops())
    assert layout.token_bytes == layout.num_layers * (48 + 16) * 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rules": (LayerRule(window=3),)}, "attention of its layers"),
        ({"rules": (LayerRule(window=-3),) * 3}, "attention of its layers"),
        ({"rules": (LayerRule(soft_cap=float("nan")),) * 3}, "attention of its layers"),
        ({"rules": (LayerRule(sinks=b"1234"),) * 3}, "attention of its layers"),
        ({"latent_dim": 16}, "a latent of 16"),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    changes: dict[str, object], says: str, tmp_path: Path
) -> None:
    request = over_the_wire(attach_options(opened("mistral-window", tmp_path, "float32"), None))
    assert [rule.window for rule in request.rules] == [20, 20, 20]
    state = new_state()
    with pytest.raises(AttachError, match=says):
        state.attach(msgspec.structs.replace(request, **changes), print)
    state.close()


def test_blocks_before_the_window_are_given_back(tmp_path: Path) -> None:
    """The places before the window in the table name a block of the window, across segments at two
    workers."""
    model = opened("mistral-window", tmp_path, "float32")
    size = SEGMENT // BLOCK
    table = [*range(size), *range(EACH, EACH + 8)]
    text = random.Random(1).choices(range(3, 290), k=SEGMENT + 200)
    layout = make_layout(model, BLOCK, choose_split_ops())
    alone = Engine(model, choose_split_ops(), empty_cache(layout, 2 * EACH))
    found = []
    with offloaded(model, 2, rings=False, by_head=False) as engine:
        for each in (alone, engine):
            tokens = list(text)
            start = StepEntry(AttemptId("0"), tokens, 0, [BlockId(b) for b in table], GREEDY)
            tokens.append(_drawn(each.step([start])))
            for _ in range(5):
                first = (len(tokens) - 20) // BLOCK  # the first block that the window touches
                held = [BlockId(table[first])] * first + [BlockId(b) for b in table[first:]]
                entry = StepEntry(AttemptId("0"), tokens[-1:], len(tokens) - 1, held, GREEDY)
                tokens.append(_drawn(each.step([entry])))
            found.append(tokens[len(text) :])
    assert found[0] == found[1] and len(set(found[0])) > 1
