"""What this engine gives to processes that compute nothing: an `EnginePackage`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.config.tables import Config
from moonpool.plugins.engines import EngineError, EnginePackage
from moonpool_engine.engine.builtin import model_info
from moonpool_engine.engine.device import DeviceError, check_device, resolve_device, resolve_dtype
from moonpool_engine.engine.gguf.shared_weights import share_weights
from moonpool_engine.engine.gguf.tokenizer import gguf_parts
from moonpool_engine.engine.parallel.spare_process import fork_spares as fork_parts

__all__ = ["device_and_dtype", "fork_parts", "gguf_parts", "model_info", "share_weights"]


def device_and_dtype(config: Config, computes_here: bool) -> tuple[str, str]:
    """Returns what `EnginePackage` says."""
    device = resolve_device(config.engine.device)
    try:
        check_device(device if computes_here else "cpu")
    except DeviceError as error:
        raise EngineError(str(error)) from None
    return device, resolve_dtype(config.model.dtype, device)


if TYPE_CHECKING:
    import moonpool_engine.package as this_module

    _checked: EnginePackage = this_module
