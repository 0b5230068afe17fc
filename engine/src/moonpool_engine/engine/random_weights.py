"""Models with random weights of any size, for tests and benchmarks: `random:m150` and so on.

Every process generates the same bits, as scaled raw output of a seeded generator. So the name alone
identifies the model, and no file is read for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moonpool.text.model_error import LARGEST, LARGEST_SIZE, ModelError
from moonpool_engine.engine.spec import ModelSpec, RopeSpec
from moonpool_engine.engine.tensors import tensor_shapes

PREFIX = "random:"
GENERATION = "random-weights-1"  # part of the fingerprint: change it with any change of the bits
MIN_VOCAB = 259
INT16_STD = 65536 / 12**0.5

_BASE = ModelSpec(
    family="llama",
    vocab_size=8192,
    hidden_size=896,
    num_layers=14,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=2816,
    max_positions=32768,
    rms_eps=1e-6,
    rope=RopeSpec(theta=500000.0),
)
SIZES = {
    "m30": replace(
        _BASE, hidden_size=384, num_layers=8, num_heads=6, num_kv_heads=2, intermediate_size=1536
    ),
    "m150": _BASE,
    "m500": replace(
        _BASE, hidden_size=1280, num_layers=24, num_heads=20, num_kv_heads=4, intermediate_size=4096
    ),
}
_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "inter": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_positions",
}
_OTHER_KEYS = ("seed", "window")


def random_spec(name: str) -> tuple[ModelSpec, int]:
    """Spec and seed of `random:SIZE` or `random:key=value,...` (missing keys as in m150).

    A size may be followed by keys: `random:m30,layers=2,seed=7`. `window`: number of tokens that
    each layer sees. Raises `ModelError`.
    """
    spec, seed, window = _BASE, 0, 0
    given: dict[str, int] = {}
    for i, word in enumerate(name.removeprefix(PREFIX).split(",")):
        key, equals, value = word.partition("=")
        if i == 0 and word in SIZES:
            spec = SIZES[word]
        elif not equals or not value.isdecimal() or (key not in (*_KEYS, *_OTHER_KEYS)):
            raise ModelError(
                f"model {name!r}: {word!r} is neither a size ({', '.join(SIZES)}) nor "
                f"key=number with a key of {', '.join([*_KEYS, *_OTHER_KEYS])}"
            )
        elif key == "seed":
            seed = int(value)
        elif key == "window":
            window = int(value)
        else:
            given[_KEYS[key]] = int(value)
    return _checked(name, spec, given, window), seed


def _checked(name: str, spec: ModelSpec, given: dict[str, int], window: int) -> ModelSpec:
    _check_numbers(name, given)
    if "num_heads" in given and "num_kv_heads" not in given:
        given["num_kv_heads"] = given["num_heads"]
    if "hidden_size" in given and "head_dim" not in given:
        given["head_dim"] = given["hidden_size"] // given.get("num_heads", spec.num_heads)
    _check_numbers(name, given)
    spec = replace(spec, **given)  # type: ignore[arg-type]
    if spec.vocab_size < MIN_VOCAB:
        raise ModelError(f"model {name!r}: vocab must be at least {MIN_VOCAB}, bytes and specials")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"model {name!r}: heads ({spec.num_heads}) must be a multiple of kv_heads "
            f"({spec.num_kv_heads})"
        )
    if 0 < window < spec.max_positions:
        spec = replace(spec, windows=(window,) * spec.num_layers)
    return spec


def _check_numbers(name: str, given: dict[str, int]) -> None:
    for key, value in given.items():
        most = LARGEST.get(key, LARGEST_SIZE)
        if not 1 <= value <= most:
            raise ModelError(f"model {name!r}: {key} must be at least 1 and at most {most}")


class RandomWeights:
    """Seeded uniform weights, scaled so that attention and next tokens depend on the input."""

    def __init__(self, spec: ModelSpec, seed: int, dtype: torch.dtype) -> None:
        self._spec = spec
        self._seed = seed
        self._dtype = dtype
        self._shapes = tensor_shapes(spec)

    @property
    def fingerprint(self) -> str:
        fields = repr((GENERATION, self._seed, sorted(self._spec.computed_fields().items())))
        return hashlib.sha256(fields.encode()).hexdigest()

    def load(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = np.random.SFC64(int.from_bytes(digest[:16], "little"))
        count = int(np.prod(shape))
        raw = generator.random_raw(-(-count // 4)).view(np.int16)[:count]
        numbers = torch.from_numpy(raw).to(torch.float32)
        return numbers.mul_(self._std(name) / INT16_STD).reshape(shape).to(self._dtype)

    def matrix(self, name: str) -> Tensor:
        return self.load(name)

    def _std(self, name: str) -> float:
        spec = self._spec
        if name == "model.embed_tokens.weight":
            return 1.0
        if name == "lm_head.weight":
            return 2.5 / float(spec.hidden_size**0.5)
        fan_in = self._shapes[name][-1]
        std = 1 / float(fan_in**0.5)
        writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return std / float((2 * spec.num_layers) ** 0.5) if writes_residual else std
