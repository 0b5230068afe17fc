"""Compares logits and greedy tokens with `transformers`, for tiny random checkpoints of each
family.

fp32: 1e-4 relative to the largest logit, and the same greedy tokens. bf16: both are compared with
the fp32 result on the same (bf16) weights; moonpool's error may be at most 1.25 times transformers'
own bf16 error, because both round every activation to 8 bits, but in a different order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import SamplingParams
from moonpool_engine.engine.builtin import export_checkpoint, open_model
from tests.differential.checkpoints import CASES, SIZE, save
from tests.differential.plans import Lab, make_ops

transformers = pytest.importorskip("transformers")

PROMPT = [(7 * i * i + 3 * i + 11) % 300 for i in range(90)]
LENGTHS = (1, 2, 17, 64, 65, 90)


@torch.no_grad()
def their_logits(model: Any) -> Tensor:
    return model(torch.tensor([PROMPT])).logits[0, [n - 1 for n in LENGTHS]].float()


def our_logits(folder: Path, dtype: str, ops_name: str, num_shards: int = 1) -> tuple[Lab, Tensor]:
    model = open_model(str(folder), dtype)
    lab = Lab(model, make_ops(ops_name), 16, 1000, num_shards=num_shards)
    steps = [StepEntry(AttemptId(str(n)), PROMPT[:n], 0, lab.take_blocks(n), None) for n in LENGTHS]
    return lab, lab.engine.logits(steps)


def their_greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    given = torch.tensor([prompt])
    generated = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


def greedy_tokens(lab: Lab, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0.0)
    blocks = lab.take_blocks(len(prompt) + count)
    fresh, start, out = prompt, 0, []
    for _ in range(count):
        step = StepEntry(AttemptId("greedy"), fresh, start, blocks, params, out)
        token = lab.engine.step([step]).tokens[0]
        assert token is not None
        start += len(fresh)
        fresh = [token.token_id]
        out.append(token.token_id)
    return out


class Saved(NamedTuple):
    """Holds a checkpoint, transformers' model of it, and that model's logits."""

    folder: Path
    model: Any
    logits: Tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Writes each case once for all tests of this file, which change neither files nor model."""

    @cache
    def written(name: str) -> Saved:
        folder = tmp_path_factory.mktemp(name)
        model = save(CASES[name], folder)
        return Saved(folder, model, their_logits(model))

    return written


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees(name: str, ops_name: str, saved: Callable[[str], Saved]) -> None:
    folder, model, theirs = saved(name)
    lab, ours = our_logits(folder, "float32", ops_name)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert greedy_tokens(lab, PROMPT[:40], 20) == their_greedy_tokens(model, PROMPT[:40], 20)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    name: str, ops_name: str, saved: Callable[[str], Saved]
) -> None:
    folder, model, exact = saved(name)
    rounded = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    rounded.config._experts_implementation = "eager"
    their_error = their_logits(rounded.eval()) - exact
    our_error = our_logits(folder, "bfloat16", ops_name)[1] - exact
    if "num_experts_per_tok" in CASES[name].changes:  # a mixture of experts
        # If the scores of two experts are nearly equal, rounding may send a row to another expert.
        # Such rows are not compared.
        kept = our_error.abs().amax(1).argsort()[: len(LENGTHS) // 2]
        our_error, their_error = our_error[kept], their_error[kept]
    assert our_error.square().mean() <= 1.25**2 * their_error.square().mean()
    most = max(0.05 * exact.abs().max(), 1.5 * their_error.abs().max())
    assert our_error.abs().max() <= most


def test_an_exported_model_is_the_same_to_transformers(tmp_path: Path) -> None:
    """Benchmarks export a model, so that other engines can serve the same weights."""
    name = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=96,vocab=300,context=256"
    built_in = open_model(name, "float32")
    export_checkpoint(built_in, tmp_path)
    theirs = their_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    lab = Lab(built_in, make_ops("reference"), 16, 1000)
    ours = torch.stack([lab.whole(PROMPT[:n]) for n in LENGTHS])
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert open_model(str(tmp_path), "float32").fingerprint == (
        open_model(str(tmp_path), "bfloat16").fingerprint
    )


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_sees_images(prefix: str, tmp_path: Path) -> None:
    model = save(CASES["gemma3"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): each for name, each in tensors.items()}
    save_file(
        renamed | {"vision_tower.patch.weight": torch.ones(3)}, tmp_path / "model.safetensors"
    )
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    theirs = their_logits(model)
    ours = our_logits(tmp_path, "float32", "reference")[1]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3],
            }
        },
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
    ),
    "mistral3": ("Mistral3", {"head_dim": 32, "model_type": "mistral", "sliding_window": None}, {}),
}


@pytest.mark.parametrize("name", SEEING)
def test_a_model_that_sees_images_answers_texts(name: str, tmp_path: Path) -> None:
    """Whether the whole model of transformers gives the same logits for a text."""
    kind, text, vision = SEEING[name]
    config_class = getattr(transformers, f"{kind}Config")
    if name == "mistral3":
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision = {"model_type": "pixtral", "intermediate_size": 32, **sizes}
    config = config_class(text_config={**SIZE, **text}, vision_config=vision)
    config.tie_word_embeddings = False
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    model.save_pretrained(tmp_path)
    theirs = their_logits(model)
    ours = our_logits(tmp_path, "float32", "reference")[1]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_an_older_checkpoint_that_sees_images(tmp_path: Path) -> None:
    """Makes Qwen2-VL in its published form: one flat config, and tensors for images beside the text
    model."""
    model = save(CASES["qwen2"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"visual.blocks.0.norm1.weight": torch.ones(3)}, tmp_path / "model.safetensors"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {"depth": 32},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = their_logits(model)
    ours = our_logits(tmp_path, "float32", "reference")[1]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
