"""Checkpoints in the Hugging Face layout: `config.json` and safetensors, in one file or in shards.

This module finds a checkpoint (a folder, or an id in the Hub and its local cache), checks every
tensor's name and shape before reading, and computes the fingerprint of the weights. Tensors are
mapped and cast one by one, so loading never holds the model twice. Other formats of checkpoints are
refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moonpool.text.model_error import ModelError
from moonpool.text.model_folder import WORD_PATTERNS, file_in, find_folder, read_config, read_json
from moonpool.text.shown import listed, shown, shown_name
from moonpool_engine.engine.families.config import parse_config
from moonpool_engine.engine.families.stored import Shape, StoredTensor
from moonpool_engine.engine.quantized.checkpoints import (
    FURTHER,
    STORED_TYPES,
    Scheme,
    expert_matrix,
    read_scheme,
)
from moonpool_engine.engine.quantized.matrix import Matrix, plain, reordered
from moonpool_engine.engine.spec import ModelSpec
from moonpool_engine.engine.tensors import stored_shapes, stored_tensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HUB_PATTERNS = [*WORD_PATTERNS, "*.safetensors"]
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FOREIGN_SUFFIXES = {".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".safetensors"}
SAMPLE_BYTES = 4096
SAMPLES_PER_TENSOR = 8
# Tensors that some exporters add and the engine does not need.
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|^visual\.|^mtp\.|^model\.mtp_")
# Parts named `visual` see images, and parts named `mtp` predict further tokens.
TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint; its weights are read on demand."""

    folder: Path
    spec: ModelSpec
    weights: CheckpointWeights
    fingerprint: str


def open_checkpoint(name: str, dtype: torch.dtype) -> Checkpoint:
    """Opens and checks the checkpoint in folder `name`, or of the Hub id `name`."""
    folder = find_folder(name, HUB_PATTERNS)
    config = read_config(folder)
    where = str(folder / "config.json")
    scheme = read_scheme(config, where)
    spec = parse_config({k: v for k, v in config.items() if k != "quantization_config"}, where)
    files = _tensor_files(folder)
    prefix = _prefix(files)
    layers, experts = f"{prefix}layers.", ".mlp.experts.gate_up_proj"
    joined = any(name.startswith(layers) and name.endswith(experts) for name in files)
    spec = replace(spec, prefix=prefix, joined_experts=joined)
    headers = {path: _Header.read(path) for path in sorted(set(files.values()))}
    shapes = _shapes(spec, scheme, files, headers)
    _check_tensors(spec, shapes, files, headers, scheme)
    weights = CheckpointWeights(files, dtype, stored_tensors(spec), scheme)
    return Checkpoint(folder, spec, weights, _fingerprint(spec, shapes, files, headers))


class CheckpointWeights:
    """Reads tensors from mapped safetensors files and casts them to one dtype."""

    def __init__(
        self,
        files: Mapping[str, Path],
        dtype: torch.dtype,
        places: Mapping[str, StoredTensor],
        scheme: Scheme | None = None,
    ) -> None:
        """`files`: the file of each stored name. `places`: where each of the model's tensors is
        stored. `scheme`: how the linears are quantized."""
        self._files = files
        self._dtype = dtype
        self._places = places
        self._scheme = scheme

    def load(self, name: str) -> Tensor:
        place = self._places[name]
        if self._scheme is not None and self._scheme.packs(place.name, place.shape):
            return plain(self.matrix(name))
        return self._plain(name, place.take(self._read(place.name)))

    def matrix(self, name: str) -> Matrix:
        place = self._places[name]
        if self._scheme is None or not self._scheme.packs(place.name, place.shape):
            return self.load(name)
        stored = self._read(place.name) if place.name in self._files else None
        if stored is not None and stored.dtype in PLAIN_DTYPES:
            return self._plain(name, place.take(stored))
        if self._scheme.kind == "mxfp4":
            return expert_matrix(name, place.name, self._read, self._dtype)
        stored_rows = self._scheme.matrix(place.name, place.shape, self._read, self._dtype)
        own = place.take(torch.arange(place.shape[0]).unsqueeze(1)).flatten()
        whole = len(own) == place.shape[0] and bool((own.diff() == 1).all())
        return stored_rows if whole else reordered(stored_rows, own)

    def _read(self, name: str) -> Tensor:
        """Returns a tensor in the form in which it is stored. Raises KeyError."""
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def _plain(self, name: str, tensor: Tensor) -> Tensor:
        # A choice between experts must not turn on a rounded bias.
        # A decay, which counts in every later token, must not be rounded either.
        exact = name.endswith((".correction", ".A_log", ".dt_bias"))
        dtype = torch.float32 if exact else self._dtype
        # Copies even if the dtype is equal: a mapped tensor is unaligned and keeps its pages
        # mapped.
        return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class _Header:
    """The JSON header of one safetensors file, and the offset of its data."""

    path: Path
    tensors: Mapping[str, Any]  # name -> {"dtype", "shape", "data_offsets"}
    data_start: int

    @classmethod
    def read(cls, path: Path) -> _Header:
        """Reads the header. Raises ModelError for a file that is absent or no safetensors file."""
        try:
            with safe_open(path, framework="pt"):
                pass  # checks that the header fits the file's size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                tensors = json.loads(file.read(length))
        except (OSError, SafetensorError, ValueError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
        tensors.pop("__metadata__", None)
        return cls(path, tensors, 8 + length)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor, by name."""
    if (folder / INDEX_FILE).exists():
        return _indexed_files(folder)
    single = file_in(folder, SINGLE_FILE)
    if not single.is_file():
        foreign = sorted(p.name for p in folder.iterdir() if p.suffix in FOREIGN_SUFFIXES)
        there = f", only {listed(foreign)}" if foreign else ""
        raise ModelError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{there}; other weight formats are "
            "not read (convert them with transformers' save_pretrained)"
        )
    return dict.fromkeys(_Header.read(single).tensors, single)


def _indexed_files(folder: Path) -> dict[str, Path]:
    path = file_in(folder, INDEX_FILE)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{path} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise ModelError(
                f"{path}: weight_map gives tensor {shown_name(tensor)} the file {shown(name)},"
                " which is no file's name"
            )
    paths = {name: file_in(folder, name) for name in set(weight_map.values())}
    absent = sorted(name for name, found in paths.items() if not found.is_file())
    if absent:
        raise ModelError(f"{folder} lacks {listed(absent)}, named in {INDEX_FILE}")
    return {tensor: paths[name] for tensor, name in weight_map.items()}


def _shapes(
    spec: ModelSpec,
    scheme: Scheme | None,
    files: Mapping[str, Path],
    headers: Mapping[Path, _Header],
) -> dict[str, Shape | None]:
    """Returns all tensors that the checkpoint must have, with None as shape if it depends on the
    scheme."""
    shapes: dict[str, Shape | None] = {}
    for name, shape in stored_shapes(spec).items():
        entry = headers[files[name]].tensors.get(name, {}) if name in files else {}
        is_plain = entry.get("dtype") in STORED_TYPES
        if scheme is None or not scheme.packs(name, shape) or is_plain or "embed" in name:
            shapes[name] = shape
        else:
            shapes |= scheme.parts(name, shape, files.__contains__)
    return shapes


def _prefix(files: Mapping[str, Path]) -> str:
    """Returns the prefix of a text model's tensor names, also in a model of text and images. Models
    for embeddings alone often begin with nothing."""
    inner = [p for p in TEXT_PREFIXES if any(name.startswith(p) for name in files)]
    return inner[0] if inner else "" if "embed_tokens.weight" in files else "model."


def _check_tensors(
    spec: ModelSpec,
    shapes: Mapping[str, Shape | None],
    files: Mapping[str, Path],
    headers: Mapping[Path, _Header],
    scheme: Scheme | None,
) -> None:
    """Raises ModelError."""
    missing = [name for name in shapes if name not in files]
    if missing:
        raise ModelError(f"the checkpoint lacks tensors: {listed(missing)}")
    tied = {"lm_head.weight"} if spec.tie_embeddings else set()
    further = tuple(
        f"{spec.prefix}layers.{spec.num_layers + i}." for i in range(spec.further_layers)
    )
    unexpected = [
        name
        for name in files
        if name not in shapes
        and name not in tied
        and not IGNORED.search(name)
        and not name.startswith(further)
        # all other tensors belong to the part that sees images
        and (spec.prefix == "model." or name.startswith(spec.prefix))
        and not name.endswith(FURTHER)
    ]
    if unexpected:
        raise ModelError(
            f"the checkpoint has tensors its config.json gives no use for: {listed(unexpected)}"
        )
    for name, shape in shapes.items():
        entry = headers[files[name]].tensors.get(name)
        if entry is None:
            raise ModelError(f"{files[name]} lacks tensor {name}, which {INDEX_FILE} puts there")
        allowed = STORED_TYPES if scheme is None else scheme.stored_types(name, shape)
        if shape is not None and tuple(entry["shape"]) != shape:
            raise ModelError(
                f"tensor {name} has shape {entry['shape']}, by config.json it must be {list(shape)}"
            )
        if entry["dtype"] not in allowed:
            raise ModelError(
                f"tensor {name} is stored as {entry['dtype']}; by config.json only "
                f"{', '.join(sorted(allowed))} are possible"
            )


def _fingerprint(
    spec: ModelSpec,
    names: Iterable[str],
    files: Mapping[str, Path],
    headers: Mapping[Path, _Header],
) -> str:
    """The identity of config and weights: names, shapes, and samples of every tensor.

    Eight windows of 4 KiB per tensor distinguish training runs, merges and fine-tunes, which change
    all elements of the tensors they touch. The samples cost milliseconds. Hashing 16 GB would cost
    every worker ten seconds and a pass over the disk. Damage to a file is not detected.
    """
    digest = hashlib.sha256(repr(sorted(spec.computed_fields().items())).encode())
    opened = {path: path.open("rb") for path in headers}
    try:
        for name in names:
            header = headers[files[name]]
            entry = header.tensors[name]
            begin, end = entry["data_offsets"]
            digest.update(repr((name, entry["dtype"], entry["shape"])).encode())
            last = max(end - begin - SAMPLE_BYTES, 0)
            for i in range(SAMPLES_PER_TENSOR):
                offset = last * i // (SAMPLES_PER_TENSOR - 1)
                file = opened[header.path]
                file.seek(header.data_start + begin + offset)
                digest.update(file.read(min(SAMPLE_BYTES, end - begin)))
    finally:
        for file in opened.values():
            file.close()
    return digest.hexdigest()
