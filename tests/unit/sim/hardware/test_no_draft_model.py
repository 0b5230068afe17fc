"""Draft models are not simulated, and that is said."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.config import Config, ConfigError, EngineConfig, SpeculativeConfig
from moonpool.sim.hardware.build import build_hardware


def test_a_draft_model_is_refused() -> None:
    drafts = SpeculativeConfig(method="draft_model", model="small")
    engine = EngineConfig(speculative_config=drafts)
    with pytest.raises(ConfigError, match="draft model's time and memory are not modelled"):
        build_hardware(msgspec.structs.replace(Config(), engine=engine))
