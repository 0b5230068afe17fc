"""An `EnginePackage`: what this engine gives to processes that compute nothing.

Importing this module does not import torch. For GGUF files on CPUs, only `share_weights` imports
it. So a head can read its model while another process imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moonpool.config.tables import Config
from moonpool.plugins.engines import EngineError, EnginePackage
from moonpool.text.model_info import ModelInfo
from moonpool_engine.engine.device_choice import (
    DeviceError,
    check_device,
    resolve_device,
    resolve_dtype,
)
from moonpool_engine.engine.gguf.files import gguf_file, names_gguf
from moonpool_engine.engine.gguf.tokenizer import gguf_parts

__all__ = [
    "describes_quickly",
    "device_and_dtype",
    "fork_parts",
    "gguf_parts",
    "model_info",
    "share_weights",
]


def model_info(name: str, dtype: str, lora_modules: tuple[str, ...] = ()) -> ModelInfo:
    """Like `EnginePackage.model_info`."""
    found = None if lora_modules else gguf_file(name)
    if found is not None:
        from moonpool_engine.engine.gguf.info import gguf_info

        return gguf_info(found)
    from moonpool_engine.engine import builtin

    return builtin.model_info(name, dtype, lora_modules)


def describes_quickly(config: Config) -> bool:
    """Like `EnginePackage.describes_quickly`."""
    if config.model.lora_modules or config.engine.kind != "moonpool":
        return False
    drafts = config.engine.speculative_config
    names = [config.model.name, *([drafts.model] if drafts is not None and drafts.model else [])]
    return all(map(names_gguf, names)) and resolve_device(config.engine.device) == "cpu"


def device_and_dtype(config: Config, computes_here: bool) -> tuple[str, str]:
    """Like `EnginePackage.device_and_dtype`."""
    device = resolve_device(config.engine.device)
    try:
        check_device(device if computes_here else "cpu")
    except DeviceError as error:
        raise EngineError(str(error)) from None
    return device, resolve_dtype(config.model.dtype, device)


def share_weights(config: Config) -> object | None:
    """Like `EnginePackage.share_weights`."""
    from moonpool_engine.engine.gguf import shared_weights

    return shared_weights.share_weights(config)


def fork_parts(
    count: int, end_with: Callable[[int], object], run_line: Callable[[list[str]], object]
) -> None:
    """Like `EnginePackage.fork_parts`."""
    from moonpool_engine.engine.parallel.spare_process import fork_spares

    fork_spares(count, end_with, run_line)


if TYPE_CHECKING:
    import moonpool_engine.package as this_module

    _checked: EnginePackage = this_module
