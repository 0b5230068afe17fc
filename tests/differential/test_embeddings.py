"""Compares embeddings with those of `transformers` in float32, and with moonpool's own embeddings
of prompts in chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.text.model_error import ModelError
from moonpool.types import SamplingParams
from moonpool_engine.engine.builtin import LoadedModel, open_model, open_tokenizer
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.parallel.tensor_ranks import sharded_engine
from moonpool_engine.engine.pooling import stored_pooling
from moonpool_engine.engine.runner import make_layout
from tests.differential.checkpoints import CASES, save
from tests.differential.plans import Lab, make_ops

transformers = pytest.importorskip("transformers")

Way = Literal["last", "mean"]
PROMPT = [(7 * i * i + 3 * i + 11) % 300 for i in range(90)]
FAMILIES = [name for name in CASES if name in ("llama", "qwen3", "gemma3", "mixtral")] or [
    next(iter(CASES))
]


def embed(lab: Lab, prompt: list[int], way: Way, cuts: list[int]) -> NDArray[np.float32]:
    """Returns the embedding of a prompt that is computed in chunks which end at `cuts`."""
    blocks, start, carried = lab.take_blocks(len(prompt)), 0, b""
    for end in [*cuts, len(prompt)]:
        last = end == len(prompt)
        entry = StepEntry(
            AttemptId("embed"),
            prompt[start:end],
            start,
            blocks,
            SamplingParams(pooling=way) if last else None,
            pooling=way if last or way == "mean" else "none",
            pooled=carried,
        )
        # Another request, which draws a token, shares the step.
        drawing = StepEntry(AttemptId("draw"), prompt[:9], 0, lab.take_blocks(9), SamplingParams())
        done = lab.engine.step([drawing, entry])
        assert done.tokens[0] is not None and not done.tokens[0].payload
        carried, start = done.pooled.get(1, b""), end
    token = done.tokens[1]
    assert token is not None
    return np.frombuffer(token.payload, "<f4")


@torch.no_grad()
def theirs(model: Any, prompt: list[int], way: Way) -> NDArray[np.float32]:
    states = model.model(torch.tensor([prompt])).last_hidden_state[0].float()
    vector = states[-1] if way == "last" else states.mean(0)
    found: NDArray[np.float32] = (vector / vector.norm()).numpy()
    return found


@pytest.mark.parametrize("way", ["last", "mean"])
@pytest.mark.parametrize("name", FAMILIES)
def test_they_are_those_of_transformers(name: str, way: Way, ops_name: str, tmp_path: Path) -> None:
    model = save(CASES[name], tmp_path)
    lab = Lab(open_model(str(tmp_path), "float32"), make_ops(ops_name), 16, 1000)
    ours = embed(lab, PROMPT, way, [])
    assert np.abs(ours - theirs(model, PROMPT, way)).max() <= 1e-5
    assert abs(np.linalg.norm(ours.astype(np.float64)) - 1) <= 1e-6


def save_bare(folder: Path) -> Any:
    """Makes a Qwen3 whose tensors are named without `model.`, as in Qwen3-Embedding."""
    model = save(CASES["qwen3"], folder)
    path = folder / "model.safetensors"
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
        if name != "lm_head.weight"
    }
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("way", ["last", "mean"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_checkpoint_of_bare_names(num_shards: int, way: Way, tmp_path: Path) -> None:
    """The embeddings must be equal to transformers', in one process and in shards, with whole
    prompts and with chunks."""
    model = save_bare(tmp_path)
    ours = open_model(str(tmp_path), "float32")
    assert ours.spec.prefix == "" and ours.spec.tie_embeddings
    lab = Lab(ours, make_ops("native"), 16, 1000)
    if num_shards > 1:
        ops = make_ops("native")
        cache = empty_cache(make_layout(ours, 16, ops, num_shards), 1000)
        lab.engine = sharded_engine(ours, ops, cache, num_shards)
    whole = embed(lab, PROMPT, way, [])
    assert np.abs(whole - theirs(model, PROMPT, way)).max() <= 1e-5
    assert embed(lab, PROMPT, way, [16, 17, 64]).tobytes() == whole.tobytes()


def test_a_name_of_no_use_is_refused_without_the_prefix_too(tmp_path: Path) -> None:
    save_bare(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"dense.weight": torch.ones(2, 2)}, path)
    with pytest.raises(ModelError, match=r"dense\.weight"):
        open_model(str(tmp_path), "float32")


@pytest.mark.parametrize("way", ["last", "mean"])
def test_bits_do_not_depend_on_chunks(way: Way, ops_name: str) -> None:
    model = open_model(
        "random:hidden=64,layers=3,heads=4,kv_heads=2,inter=128,vocab=300", "float32"
    )
    lab = Lab(model, make_ops(ops_name), 16, 4000)
    whole = embed(lab, PROMPT, way, [])
    for cuts in ([1], [16, 17, 64], list(range(1, 90))):
        assert embed(lab, PROMPT, way, cuts).tobytes() == whole.tobytes()


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    try:
        return open_model("smollm2", "float32")
    except ModelError as error:
        pytest.skip(str(error))


def test_texts_of_one_topic_are_nearer(smollm2: LoadedModel) -> None:
    tokenizer = open_tokenizer(smollm2.tokenizer, smollm2.spec.vocab_size)
    lab = Lab(smollm2, make_ops("native"), 64, 2000)
    texts = (
        "The cat sleeps on the warm sofa.",
        "A kitten naps on the couch.",
        "def f(x): return x",
    )
    cat, kitten, code = (embed(lab, tokenizer.encode(text), "mean", []) for text in texts)
    assert float(cat @ kitten) > float(cat @ code)


def write_modules(folder: Path, mode: str, *further: str) -> None:
    kinds = ("Transformer", "Pooling", *further, "Normalize")
    modules = [
        {"path": "" if kind == "Transformer" else f"{i}_{kind}", "type": f"a.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    settings = {"word_embedding_dimension": 64, mode: True, "pooling_mode_max_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def test_the_checkpoint_says_how_to_pool(tmp_path: Path) -> None:
    assert stored_pooling(tmp_path) == "last"
    write_modules(tmp_path, "pooling_mode_mean_tokens")
    assert stored_pooling(tmp_path) == "mean"
    write_modules(tmp_path, "pooling_mode_lasttoken")
    assert stored_pooling(tmp_path) == "last"
    write_modules(tmp_path, "pooling_mode_cls_token")
    assert stored_pooling(tmp_path) == "none"
    write_modules(tmp_path, "pooling_mode_mean_tokens", "Dense")
    assert stored_pooling(tmp_path) == "none"
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ModelError, match=r"modules\.json holds no list of objects"):
        stored_pooling(tmp_path)
