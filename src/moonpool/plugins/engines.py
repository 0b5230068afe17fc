"""Finds the engine of moonpool's own instances, which a separate package provides.

A front, a simulator or a planner runs without it. The engine is found by the entry point `moonpool`
of the group `moonpool.engines`, and imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moonpool.config.tables import Config
from moonpool.plugins.entry_points import entry_points, load

if TYPE_CHECKING:  # imported for types only, because a supervisor reads no models
    from moonpool.text.model_info import ModelInfo
    from moonpool.text.tokenizer import TokenizerParts

GROUP = "moonpool.engines"
NAME = "moonpool"
PACKAGE = "moonpool_engine"
"""The package to name where the engine is missing."""
BUILT_IN = ("moonpool/induction", "random:")
"""Prefixes of the names of models without files, which the engine makes."""


class EngineError(ValueError):
    """The engine cannot run as the configuration asks; one line says why and what to do."""


class EnginePackage(Protocol):
    """What the engine provides to processes that compute nothing. A module can be one."""

    def model_info(self, name: str, dtype: str, lora_modules: tuple[str, ...] = ()) -> ModelInfo:
        """The info of a model that the engine computes. Raises ModelError."""

    def gguf_parts(self, path: Path) -> TokenizerParts:
        """Returns the tokenizer's data in a GGUF file. Raises TokenizerError."""

    def device_and_dtype(self, config: Config, computes_here: bool) -> tuple[str, str]:
        """Returns the device and dtype that `config` means on this machine. `computes_here`:
        whether the instances run on this machine. Raises EngineError where the device is absent."""

    def describes_quickly(self, config: Config) -> bool:
        """Whether the methods above read only small files, so that a head need not wait for the
        import of the computing modules."""

    def share_weights(self, config: Config) -> object | None:
        """Returns weights that one process packs for all workers that are forked from it, or None
        if each worker loads its own."""

    def fork_parts(
        self,
        count: int,
        end_with: Callable[[int], object],
        run_line: Callable[[list[str]], object],
    ) -> None:
        """Prepares processes for the further stages or ranks of an instance. Each part calls
        `end_with` with the id of this process, and later `run_line` with its command line."""


def need_engine() -> None:
    """Raises ModuleNotFoundError, of which the command makes one line, if no engine is
    installed."""
    if NAME not in entry_points(GROUP):
        raise ModuleNotFoundError(name=PACKAGE)


@cache
def own_engine() -> EnginePackage:
    """Returns the engine's package, which the first call imports. Raises ModuleNotFoundError as
    `need_engine`."""
    need_engine()
    found: EnginePackage = load(entry_points(GROUP)[NAME])
    return found
