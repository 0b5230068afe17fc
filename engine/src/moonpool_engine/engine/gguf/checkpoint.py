"""A model in one GGUF file: its checked spec, its weights, and its fingerprint.

Weights stay quantized. A matrix is read from the mapped file when an engine packs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moonpool.text.model_error import ModelError
from moonpool.text.shown import listed
from moonpool.types import Pooling
from moonpool_engine.engine.gguf.architectures import SWAPPED, architecture_of, place_of
from moonpool_engine.engine.gguf.config import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    plain_vector,
    pooling_of,
)
from moonpool_engine.engine.gguf.info import gguf_spec
from moonpool_engine.engine.gguf.latent import halves_of, is_spare, joined, latent_shapes
from moonpool_engine.engine.gguf.reader import GgufFile, TensorEntry, read_gguf
from moonpool_engine.engine.gguf.tensor_location import TensorLocation
from moonpool_engine.engine.quantized.formats import FORMATS
from moonpool_engine.engine.quantized.matrix import Matrix, QuantizedMatrix
from moonpool_engine.engine.spec import ModelSpec, RopeSpec
from moonpool_engine.engine.tensors import tensor_shapes

SAMPLE_BYTES = 4096
SAMPLES_PER_TENSOR = 8
UNUSED = SHORT_FACTORS, LONG_FACTORS


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A checked file; its weights are read on demand."""

    spec: ModelSpec
    weights: GgufWeights
    fingerprint: str
    pooling: Pooling


def open_gguf(path: Path, dtype: torch.dtype) -> GgufModel:
    """Opens and checks a GGUF file. Raises `ModelError`."""
    file = read_gguf(path)
    spec = gguf_spec(file)
    if architecture_of(file).baked_norms:
        spec = replace(spec, norm_offset=0.0)
    if ROPE_FACTORS in file.tensors:
        spec = replace(spec, rope=_rope_with_factors(file, spec))
    places = _places(file, spec)
    _check_tensors(file, spec, places)
    weights = GgufWeights(file, spec, places, dtype)
    return GgufModel(spec, weights, _fingerprint(file, spec), pooling_of(file))


def _places(file: GgufFile, spec: ModelSpec) -> dict[str, TensorLocation]:
    own = architecture_of(file)
    shapes = tensor_shapes(spec)
    if own.latent:
        shapes = latent_shapes(spec, shapes, file)
    return {name: place_of(own, spec, name, shape) for name, shape in shapes.items()}


class GgufWeights:
    """Reads tensors of a mapped GGUF file by their Hugging Face names."""

    def __init__(
        self,
        file: GgufFile,
        spec: ModelSpec,
        places: Mapping[str, TensorLocation],
        dtype: torch.dtype,
    ) -> None:
        self._file = file
        self._places = places
        self._dtype = dtype
        self._heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
        self._swapped = architecture_of(file).swapped
        self._latent = spec.latent
        self._rotated = spec.rope.rotary_dim or spec.head_dim

    def release(self) -> None:
        """Drops the pages that were read: what was returned is read from the file again when it is
        used."""
        self._file.release()

    def load(self, name: str) -> Tensor:
        matrix = self.matrix(name)
        found = matrix if isinstance(matrix, Tensor) else matrix.dequantized()
        return found.neg().log() if name.endswith(".A_log") else found

    def matrix(self, name: str) -> Matrix:
        if name not in self._places and self._latent is not None:
            keys, values = (self.load(half) for half in halves_of(name))
            return joined(self._latent, keys, values)
        place = self._places[name]
        order = self._order(place)
        # Rounded weights would change the choice of experts, and the decay of a state.
        exact = ".router." in name or name.endswith((".A_log", ".dt_bias"))
        dtype = torch.float32 if exact else self._dtype
        if self._file.tensors[place.name].kind in FORMATS:
            # An embedding stays in the file: few of its rows are read.
            is_embedding = name == "model.embed_tokens.weight"
            read = self._file.rows if is_embedding else self._file.read_rows
            matrix = QuantizedMatrix((read(place.name, place.first_row, place.num_rows),), dtype)
            return matrix if order is None else matrix.reordered(order)
        stored = self._file.tensor(place.name).view(-1, place.shape[-1])
        tensor = stored[place.first_row : place.first_row + place.num_rows]
        if place.half is None:
            tensor = tensor.view(place.shape)
        return tensor.to(dtype, copy=True) if order is None else tensor[order].to(dtype)

    def _order(self, place: TensorLocation) -> Tensor | None:
        """Returns, for q and k, the stored row of each of the model's rows."""
        part = place.name.split(".")[-2]
        if place.half is not None:
            heads = torch.arange(place.num_rows).view(self._heads[part], 2, -1)
            return heads[:, place.half].flatten()
        if not self._swapped or part not in SWAPPED:
            return None
        count = place.shape[0]
        # The file stores the elements that rotate together as neighbours. The model needs all first
        # elements of a head, then all second ones.
        rows = torch.arange(count).view(self._heads[part], -1)
        pairs = rows[:, : self._rotated].unflatten(1, (-1, 2))
        return torch.cat((pairs[..., 0], pairs[..., 1], rows[:, self._rotated :]), 1).reshape(-1)


def _rope_with_factors(file: GgufFile, spec: ModelSpec) -> RopeSpec:
    """The rotary embedding with a factor for each pair's wavelength (Llama 3.1 and later)."""
    factors = plain_vector(file, ROPE_FACTORS)
    if len(factors) != spec.head_dim // 2:
        raise ModelError(
            f"{file.path}: {ROPE_FACTORS} has {len(factors)} numbers, not {spec.head_dim // 2}"
        )
    if not all(0 < factor < 1e9 for factor in factors):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} must have numbers above 0")
    return replace(spec.rope, kind="longrope", factors=tuple(factors), attention_factor=1.0)


def _check_tensors(file: GgufFile, spec: ModelSpec, places: Mapping[str, TensorLocation]) -> None:
    shapes = {place.name: place.stored_shape for place in places.values()}
    missing = [name for name in shapes if name not in file.tensors]
    if missing:
        raise ModelError(f"{file.path} lacks tensors: {listed(missing)}")
    known = {*shapes, ROPE_FACTORS, *UNUSED}
    further = tuple(f"blk.{spec.num_layers + i}." for i in range(spec.further_layers))
    unexpected = [
        name
        for name in file.tensors
        if name not in known and not is_spare(name, file) and not name.startswith(further)
    ]
    if unexpected:
        raise ModelError(f"{file.path} has tensors of no known use: {listed(unexpected)}")
    for name, shape in shapes.items():
        entry = file.tensors[name]
        if entry.shape != shape:
            raise ModelError(
                f"{file.path}: tensor {name} has shape {list(entry.shape)}, "
                f"by the metadata it must be {list(shape)}"
            )
    for place in places.values():
        kind = file.tensors[place.name].kind
        if len(place.shape) == 1 and kind in FORMATS:
            raise ModelError(f"{file.path}: tensor {place.name} is quantized ({kind})")


def _fingerprint(file: GgufFile, spec: ModelSpec) -> str:
    """The identity of config and weights: names, formats, shapes, and samples of every tensor."""
    digest = hashlib.sha256(repr(sorted(spec.computed_fields().items())).encode())
    used: Mapping[str, TensorEntry] = file.tensors
    for name in sorted(used):
        entry = used[name]
        digest.update(repr((name, entry.kind, entry.shape)).encode())
        last = max(entry.end - entry.begin - SAMPLE_BYTES, 0)
        for i in range(SAMPLES_PER_TENSOR):
            begin = entry.begin + last * i // (SAMPLES_PER_TENSOR - 1)
            sample = file.stored(entry, begin, min(begin + SAMPLE_BYTES, entry.end))
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
