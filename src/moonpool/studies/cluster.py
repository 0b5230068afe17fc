"""Builds the configuration of a simulated cluster: the paper's cluster, changed by overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moonpool.config.parse import parse_config
from moonpool.config.schema import Values, load_toml
from moonpool.config.tables import Config
from moonpool.plugins.objects import own_name
from moonpool.sim.defaults import DEFAULTS
from moonpool.studies.hardware_files import read_text_file

_ROOFLINE_KEYS = {"device", "shape", "decode_device", "attention_device"}
"""If one of these keys is given, the catalogue's hardware is simulated, not the measured node."""
_FORMAT_KEYS = {"quantization", "kv_cache_dtype"}
"""If one of these keys of [model] is given, the catalogue's hardware is simulated, because the node
was measured with bfloat16."""


def cluster_config(
    config: str | Path | Mapping[str, Mapping[str, Any]] | Config | None, overrides: Values
) -> Config:
    """Lays `overrides` (table -> key -> value) over a TOML file or tables, and both over the
    cluster of Mooncake's paper. A whole `Config` replaces that cluster. Raises ConfigError."""
    text, given = "", overrides
    if isinstance(config, Config):
        tables, slo = msgspec.to_builtins(config), config.slo.usual
        tables["slo"] |= {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s}  # a study judges by these SLOs
        given = _merged(tables, overrides)
    elif isinstance(config, Mapping):
        given = _merged(config, overrides)
    elif config is not None:
        text = read_text_file(config, "the config")
    defaults = DEFAULTS
    cluster = given.get("cluster", {})
    if cluster.get("mixed") and "prefill" not in cluster and "decode" not in cluster:
        # These replace the paper's instances, but add to the instances that a file names.
        defaults = {**DEFAULTS, "cluster": {"prefill": 0, "decode": 0}}
    sources = (load_toml(text), given)
    hardware, model = _keys(sources, "hardware"), _keys(sources, "model")
    if "cost" not in hardware and (hardware & _ROOFLINE_KEYS or model & _FORMAT_KEYS):
        given = _merged(given, {"hardware": {"cost": "roofline"}})
    return parse_config(text, given, defaults, own_name)


def _merged(tables: Mapping[str, Mapping[str, Any]], values: Values) -> dict[str, dict[str, Any]]:
    merged = {name: dict(table) for name, table in tables.items()}
    for table, keys in values.items():
        merged.setdefault(table, {}).update(keys)
    return merged


def _keys(sources: Sequence[Mapping[str, Any]], table: str) -> set[str]:
    """Returns the keys of this table in all sources. What is no table has none."""
    found = (source.get(table) for source in sources)
    return {key for values in found if isinstance(values, Mapping) for key in values}
