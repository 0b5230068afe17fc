"""The class that a Serve configuration names as its request router.

Serve pickles the router class by value, with all modules below its own, and a copied class is not
identical to the original. So this module has nothing but an import, which each process makes.
"""

from __future__ import annotations

from typing import Any


class ConductorRouter:
    """Makes the router of this process, of the class that Serve asks for."""

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        from moonpool.ray.routing.router import AskingRouter

        return AskingRouter(*arguments, **named)
