"""moonpool on Ray (docs/ray.md): a cluster whose processes Ray places, and the Conductor as the
request router of Ray Serve. The package needs the extra `ray`, which each name below imports when
used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["ConductorRouter", "RayDeployment", "deploy"]

_PLACES = {
    "ConductorRouter": "moonpool.ray.conductor_router",
    "RayDeployment": "moonpool.ray.deployment",
    "deploy": "moonpool.ray.deployment",
}

if TYPE_CHECKING:
    from moonpool.ray.conductor_router import ConductorRouter
    from moonpool.ray.deployment import RayDeployment, deploy


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'moonpool.ray' has no attribute {name!r}")
    try:
        module = importlib.import_module(_PLACES[name])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        from moonpool.installation import install_command

        text = f"moonpool.ray needs ray, which is not installed: {install_command('ray')}"
        raise ModuleNotFoundError(text, name="ray") from None
    return getattr(module, name)
