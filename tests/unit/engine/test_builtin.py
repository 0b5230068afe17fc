"""Tests built-in models: the induction model recalls, and random models are the same everywhere."""

from __future__ import annotations

import random
import string
import subprocess
import sys
from functools import cache

import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.text.model_error import ModelError
from moonpool.types import SamplingParams
from moonpool_engine.engine.builtin import DEFAULT_MODEL, LoadedModel, open_model
from moonpool_engine.engine.induction import EOS, token_codes
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout

GREEDY = SamplingParams(temperature=0.0)
SMALL = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=96,vocab=300,context=256"


@cache
def _engine(dtype: str) -> Engine:
    model = open_model(DEFAULT_MODEL, dtype)
    layout = make_layout(model, 64)
    return Engine(model, choose_ops(dtype), empty_cache(layout, layout.blocks_for(3200)))


class Writer:
    """Continues one text, which may grow by questions. All tests of a dtype share the engine."""

    def __init__(self, dtype: str) -> None:
        self.engine = _engine(dtype)
        self.engine.cache.blocks.zero_()
        self.blocks = list(range(len(self.engine.cache.blocks)))
        self.length = 0

    def read(self, token_ids: list[int], params: SamplingParams = GREEDY) -> int:
        token = None
        for begin in range(0, len(token_ids), 512):
            chunk = token_ids[begin : begin + 512]
            step = StepEntry(AttemptId("w"), chunk, self.length, self.blocks, params)
            token = self.engine.step([step]).tokens[0]
            self.length += len(chunk)
        assert token is not None
        return token.token_id

    def answer(self, text: str, count: int, params: SamplingParams = GREEDY) -> str:
        token, out = self.read(list(text.encode()), params), b""
        for _ in range(count - 1):
            out += bytes([token])
            token = self.read([token], params)
        return (out + bytes([token])).decode()


@cache
def _pairs(count: int) -> dict[str, str]:
    rng = random.Random(7)
    pick = string.ascii_lowercase + string.digits
    return {"".join(rng.choices(pick, k=4)): "".join(rng.choices(pick, k=6)) for _ in range(count)}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_recalls_values_thousands_of_tokens_back(dtype: str) -> None:
    pairs = _pairs(200)
    text = "".join(f"[{key}={value}]" for key, value in pairs.items())
    writer = Writer(dtype)
    writer.read(list(text.encode()))
    asked = list(pairs)[::20]
    assert [writer.answer(f" [{key}=", 7) for key in asked] == [pairs[key] + "]" for key in asked]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_continues_a_sentence_also_when_sampling(dtype: str) -> None:
    text = "The quick brown fox jumps over the lazy dog. Then it rests. The quick br"
    sampled = SamplingParams(temperature=1.0, seed=5)
    for params in (GREEDY, sampled):
        assert Writer(dtype).answer(text, 20, params) == "own fox jumps over t"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefers_the_recent_of_two_equal_contexts(dtype: str) -> None:
    filler = "".join(f"({key})" for key in _pairs(60))
    text = f"the code is red. {filler}the code is blue. {filler}the code is "
    assert Writer(dtype).answer(text, 5) == "blue."


def test_eos_comes_where_it_came_before() -> None:
    writer = Writer("float32")
    writer.read([*b"question one? answer.", EOS, *b"question one? answe"])
    assert writer.read([ord("r")]) == ord(".")
    assert writer.read([ord(".")]) == EOS


def test_codes_are_far_apart() -> None:
    codes = token_codes()
    overlaps = codes @ codes.T - 2 * torch.eye(259)
    assert overlaps[:256, :256].max() == 0.25
    assert overlaps.max() == 0.5
    assert torch.allclose(codes.square().sum(1), torch.ones(259))


def test_every_layer_matters_far_back() -> None:
    """Damage to a block far back, in any layer that searches, must change the recalled value."""
    pairs = _pairs(60)
    text = "".join(f"[{key}={value}]" for key, value in pairs.items())
    key = list(pairs)[2]  # a key whose value is in block 0
    for layer in (None, 3, 4):
        writer = Writer("float32")
        writer.read(list(text.encode()))
        cache = writer.engine.cache.blocks
        if layer is not None:
            cache[0, layer] = cache[1, layer]
        recalled = writer.answer(f" [{key}=", 7) == pairs[key] + "]"
        assert recalled == (layer is None), f"layer {layer}"


def _first_bits(model: LoadedModel) -> bytes:
    return model.weights.load("model.layers.1.mlp.down_proj.weight")[:2].numpy().tobytes()


@pytest.mark.long
def test_random_weights_are_the_same_in_every_process() -> None:
    script = (
        "from moonpool_engine.engine.builtin import open_model\n"
        f"m = open_model({SMALL!r}, 'float32')\n"
        "w = m.weights.load('model.layers.1.mlp.down_proj.weight')\n"
        "print(m.fingerprint, w[:2].numpy().tobytes().hex())\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    here = open_model(SMALL, "float32")
    assert run.stdout.split() == [here.fingerprint, _first_bits(here).hex()]


def test_random_weights_differ_by_seed_and_tensor() -> None:
    first, second = open_model(SMALL, "float32"), open_model(SMALL + ",seed=2", "float32")
    assert first.fingerprint != second.fingerprint
    assert _first_bits(first) != _first_bits(second)
    q = first.weights.load("model.layers.0.self_attn.q_proj.weight")
    assert not torch.equal(q, first.weights.load("model.layers.1.self_attn.q_proj.weight"))
    assert abs(float(q.std()) - 64**-0.5) < 0.01


def test_random_sizes() -> None:
    millions = {"m30": 23.6, "m150": 146, "m500": 493}
    for size, expected in millions.items():
        spec = open_model(f"random:{size}", "bfloat16").spec
        assert abs(spec.num_parameters / 1e6 - expected) < 1
    assert open_model("random:m30,layers=2", "bfloat16").spec.num_layers == 2


@pytest.mark.parametrize(
    "name",
    ["random:m31", "random:", "random:layers=x", "random:heads=4,kv_heads=3", "random:vocab=9"],
)
def test_bad_random_names(name: str) -> None:
    with pytest.raises(ModelError, match="random:"):
        open_model(name, "float32")


def test_bad_dtype() -> None:
    with pytest.raises(ModelError, match="float16"):
        open_model(DEFAULT_MODEL, "float16")
