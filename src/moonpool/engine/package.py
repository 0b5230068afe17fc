"""What this engine gives to processes that compute nothing: an `EnginePackage`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.config import Config
from moonpool.engine.builtin import model_info
from moonpool.engine.device import DeviceError, check_device, resolve_device, resolve_dtype
from moonpool.engine.gguf.shared_weights import share_weights
from moonpool.engine.gguf.tokenizer import gguf_parts
from moonpool.engine.parallel.spare_process import fork_spares as fork_parts
from moonpool.plugins.engines import EngineError, EnginePackage

__all__ = ["device_and_dtype", "fork_parts", "gguf_parts", "model_info", "share_weights"]


def device_and_dtype(config: Config, computes_here: bool) -> tuple[str, str]:
    """As `EnginePackage` says."""
    device = resolve_device(config.engine.device)
    try:
        check_device(device if computes_here else "cpu")
    except DeviceError as error:
        raise EngineError(str(error)) from None
    return device, resolve_dtype(config.model.dtype, device)


if TYPE_CHECKING:
    import moonpool.engine.package as this_module

    _checked: EnginePackage = this_module
