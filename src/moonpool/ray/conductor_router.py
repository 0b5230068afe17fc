"""What a Serve configuration names as its request router.

Serve pickles that class together with all modules below the module by which it is named, and copies
of classes are not the classes. So this one has nothing but an import, which each process makes.
"""

from __future__ import annotations

from typing import Any


class ConductorRouter:
    """Makes the router of this process, of the class that Serve asks for."""

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        from moonpool.ray.routing.router import AskingRouter

        return AskingRouter(*arguments, **named)
