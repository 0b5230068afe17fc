"""Makes LoRA adapters in PEFT's layout with random weights, and models with the same adapters
merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, linears: dict[str, tuple[int, int]], rank: int, seed: int, **settings: Any
) -> dict[str, tuple[Tensor, Tensor]]:
    """Writes an adapter of the linears, given as name -> (out, in). Returns its A and B."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = torch.Generator().manual_seed(seed)
    factors = {
        name: (
            torch.randn(rank, in_features, generator=drawn) / in_features**0.5,
            torch.randn(out_features, rank, generator=drawn) * 0.3,
        )
        for name, (out_features, in_features) in linears.items()
    }
    tensors = {}
    for name, (a, b) in factors.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": sorted({name.rpartition(".")[2] for name in linears}),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return factors


def linears_of(model: Any, kinds: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Returns the linears of a `transformers` model whose names have this ending."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith(kinds)
    }


@torch.no_grad()
def merge(model: Any, factors: dict[str, tuple[Tensor, Tensor]], scale: float) -> None:
    """Adds the adapter to the weights of a `transformers` model."""
    modules = dict(model.named_modules())
    for name, (a, b) in factors.items():
        modules[name].weight += scale * (b @ a)
