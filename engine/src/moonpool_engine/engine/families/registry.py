"""The model families that the engine serves.

A description (`dense`, `mixtures`) says how a family differs from Llama. `config` reads a
checkpoint's config with the registry, and `engine.tensors` finds the weights with it. The model
itself knows no family: it follows the resulting `ModelSpec`. A family whose parts all exist is one
entry there.
"""

from __future__ import annotations

from moonpool_engine.engine.families.dense import DENSE
from moonpool_engine.engine.families.family import Family
from moonpool_engine.engine.families.mixtures import MIXTURES

FAMILIES: dict[str, Family] = DENSE | MIXTURES
"""The families by the `model_type` of their configs."""
