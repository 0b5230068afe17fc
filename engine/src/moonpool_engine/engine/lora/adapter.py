"""Reads adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

Every tensor's name and shape is checked against the model before any is read. An adapter that asks
for what the engine does not compute is refused in one line.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moonpool.config.rules import lora_module
from moonpool.text.fields import Fields
from moonpool.text.model_error import ModelError
from moonpool.text.model_folder import file_in, find_folder, read_json
from moonpool.text.shown import shown, shown_name
from moonpool_engine.engine.families.stored import StoredTensor
from moonpool_engine.engine.spec import ModelSpec
from moonpool_engine.engine.tensors import stored_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 1024
_STORED_DTYPES = ("F32", "F16", "BF16")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_ADAPTABLE = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(shared_experts\.)?(gate|up|down)_proj)"
)
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""Fields of `adapter_config.json`, with the values besides null that the engine computes."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter adds to one linear: `up @ down`, in the model's dtype; `up` includes the
    scale."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. `fingerprint` identifies the adapter's content, in every process."""

    name: str
    folder: Path
    fingerprint: str
    modules: Mapping[str, Factors]  # factors by the model's own names of linears


def open_adapters(
    modules: Sequence[str], spec: ModelSpec, dtype: torch.dtype
) -> tuple[Adapter, ...]:
    """Opens adapters given as NAME=PATH. Raises `ModelError` and `ConfigError`."""
    return tuple(_open(*lora_module(module), spec, dtype) for module in modules)


def _open(name: str, path: str, spec: ModelSpec, dtype: torch.dtype) -> Adapter:
    try:
        folder = find_folder(path, ["adapter_*"])
        settings = _settings(folder)
        if spec.latent is not None:
            raise ModelError("adapters of models with latent attention are not served")
        if spec.delta is not None:
            raise ModelError("adapters of models with linear attention are not served")
        stored = _tensors(file_in(folder, WEIGHTS_FILE))
        modules = _modules(stored, _scale(settings), spec, dtype)
    except ModelError as error:
        raise ModelError(f"LoRA adapter {name}: {error}") from None
    return Adapter(name, folder, _fingerprint(settings, stored), modules)


def _settings(folder: Path) -> Fields:
    path = file_in(folder, CONFIG_FILE)
    try:
        settings = read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{folder} has no {CONFIG_FILE}: give the folder PEFT wrote") from None
    fields = Fields(settings, CONFIG_FILE)
    kind = fields.text("peft_type")
    if kind != "LORA":
        raise ModelError(f"peft_type {shown(kind)} is not served, only 'LORA' is")
    for field, served in _REFUSED.items():
        value = settings.get(field)
        if value is not None and not any(value == one for one in served):
            raise ModelError(
                f"{field} {shown(value)} in {CONFIG_FILE} is not served;"
                " merge the adapter into its model instead"
            )
    return fields


def _scale(settings: Fields) -> float:
    rank, alpha = settings.positive("r"), settings.number("lora_alpha", or_zero=True)
    if rank > MAX_RANK:
        raise settings.error(f"r is {rank}; at most {MAX_RANK} is supported")
    return alpha / (rank**0.5 if settings.flag("use_rslora") else rank)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of the file, in float32, by rising name."""
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}; other formats are not read")
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                stored = file.get_slice(name)
                if stored.get_dtype() not in _STORED_DTYPES or len(stored.get_shape()) != 2:
                    raise ModelError(f"tensor {shown_name(name)} is not a matrix of floats")
                found[name] = file.get_tensor(name).to(torch.float32)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from None
    return found


def _modules(
    stored: Mapping[str, Tensor], scale: float, spec: ModelSpec, dtype: torch.dtype
) -> dict[str, Factors]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(f"tensor {shown_name(name)} is no part of a LoRA that is served")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise ModelError(f"{WEIGHTS_FILE} has no tensors")
    places: dict[str, list[tuple[str, StoredTensor]]] = {}
    for own, place in stored_tensors(spec).items():
        if own.endswith(".weight"):
            module = place.name.removesuffix(".weight")
            places.setdefault(module, []).append((own.removesuffix(".weight"), place))
    found: dict[str, Factors] = {}
    for module, pair in pairs.items():
        targets = places.get(module, [])
        if not targets or not all(_ADAPTABLE.fullmatch(own) for own, _ in targets):
            served = "q, k, v, o, gate, up and down projections of this model's layers"
            raise ModelError(f"module {shown_name(module)} cannot be adapted; served are {served}")
        if len(pair) != 2:
            raise ModelError(f"module {module} lacks lora_A or lora_B")
        out_features, in_features = targets[0][1].shape
        down, up = pair["A"], pair["B"]
        rank = len(down)
        shapes = tuple(down.shape), tuple(up.shape)
        if not rank <= MAX_RANK or shapes != ((rank, in_features), (out_features, rank)):
            raise ModelError(
                f"module {module} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, but "
                f"its linear is [{out_features}, {in_features}]: the adapter is of another model"
            )
        for own, place in targets:
            scaled = (place.take(up) * scale).to(dtype).contiguous()
            found[own] = Factors(down.to(dtype).contiguous(), scaled)
    return found


def _fingerprint(settings: Fields, stored: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(repr(_scale(settings)).encode())
    for name, tensor in stored.items():
        digest.update(repr((name, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
