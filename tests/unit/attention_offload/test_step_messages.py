"""For every model family, only Q, K, V and outputs of new rows are sent between model worker and
attention worker; the residual stream stays in the model worker."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import SamplingParams
from moonpool_engine.attention_offload.channel import AttentionChannelError, Payload, SocketChannel
from moonpool_engine.attention_offload.executor import AttentionExecutor
from moonpool_engine.attention_offload.partition import WorkerBlockRanges
from moonpool_engine.attention_offload.remote_ops import RemoteOps
from moonpool_engine.attention_offload.wire import ATTENDED, KEYS_VALUES, PLAN, Header, Q
from moonpool_engine.engine.builtin import BYTE_TOKENIZER, LoadedModel
from moonpool_engine.engine.ops import HeadShape, KvCache, empty_cache
from moonpool_engine.engine.random_weights import RandomWeights, random_spec
from moonpool_engine.engine.runner import Engine, choose_split_ops, make_layout

NAME = "random:hidden=64,layers=2,heads=4,kv_heads=2,head_dim=16,inter=96,vocab=300,context=512"
GREEDY = SamplingParams(temperature=0.0)
FAMILIES = {
    "llama": {},
    "llama with biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": "head"},
    "tied": {"tie_embeddings": True},
}


class CountingChannel(SocketChannel):
    """Records the kind and size of every message in both directions."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, 10.0, reads_ahead=True)
        self.seen: list[tuple[int, int]] = []

    def send(self, header: Header, *payload: Payload) -> None:
        self.seen.append((header.kind, header.num_bytes))
        super().send(header, *payload)

    def receive(self, target: Payload | None = None) -> Header:
        header = super().receive(target)
        self.seen.append((header.kind, header.num_bytes))
        return header


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("staggered", [False, True])
def test_only_queries_keys_values_and_outputs_cross(family: str, staggered: bool) -> None:
    spec = replace(random_spec(NAME)[0], **FAMILIES[family])  # type: ignore[arg-type]
    weights = RandomWeights(spec, 0, torch.float32)
    model = LoadedModel(NAME, spec, weights, "float32", weights.fingerprint, BYTE_TOKENIZER)
    layout = make_layout(model, 16, choose_split_ops())
    blocks = empty_cache(layout, 32)
    ours, theirs = socket.socketpair()
    channel, far = CountingChannel(ours), SocketChannel(theirs, None)
    executor = AttentionExecutor(
        choose_split_ops(), blocks, HeadShape(4, 2, 16), 0.25, lambda written, epoch: None
    )

    def serve() -> None:
        with pytest.raises(AttentionChannelError):
            executor.serve(far)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        shape = (32, layout.num_layers, layout.slice_elements)
        unseen = KvCache(torch.empty(1, 1, 1).expand(shape), layout)
        ops = RemoteOps(choose_split_ops(), [channel], WorkerBlockRanges((32,)))
        remote = Engine(model, ops, unseen, staggered=staggered)
        local = Engine(model, choose_split_ops(), empty_cache(layout, 32))
        prompts = [
            StepEntry(AttemptId(str(i)), [i, 5, 9 + i], 0, [2 * i], GREEDY) for i in range(9)
        ]
        assert remote.step(prompts).tokens == local.step(prompts).tokens
        channel.seen.clear()
        decodes = [StepEntry(AttemptId(str(i)), [7], 3, [2 * i], GREEDY) for i in range(9)]
        assert remote.step(decodes).tokens == local.step(decodes).tokens
    finally:
        channel.close()
        thread.join(60)
    rows = {False: [9], True: [4, 5]}[staggered]
    row_bytes = 16 * 4
    expected = [
        crossing
        for count in rows
        for crossing in (
            (Q, 4 * count * row_bytes),
            (KEYS_VALUES, 2 * 2 * count * row_bytes),
            (ATTENDED, 4 * count * row_bytes),
        )
    ] * layout.num_layers
    assert sorted(c for c in channel.seen if c[0] != PLAN) == sorted(expected)
    assert sum(kind == PLAN for kind, _ in channel.seen) == len(rows)
