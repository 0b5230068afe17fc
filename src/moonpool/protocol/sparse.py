"""The form of a message for a peer of the previous version, which refuses fields that it does not
know.

Fields with their default value are left out. So a setting or field of a newer version reaches such
a peer only if it is in use, and the peer then refuses the message. Fields that the peer can do
without are always left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

DISPENSABLE = frozenset(
    {
        "cache_share",
        "rank",
        "cache_view",
        "context_tokens",
        "engine_status",
        "route",
        "num_direct",
        "longest_gap_s",
    }
)
"""Fields since protocol 11 without which a peer serves the request as well. In a struct that is
encoded as an array, these fields are the last ones."""


def without_defaults(value: Any) -> Any:
    """Returns an object that encodes to the message without the fields that have their default
    value or are dispensable."""
    if isinstance(value, msgspec.Struct):
        form = value.__struct_config__
        if form.array_like:
            return [
                without_defaults(getattr(value, field.name))
                for field in msgspec.structs.fields(value)
                if not _is_dispensable(field)
            ]
        found: dict[str, Any] = {}
        if form.tag_field is not None:
            found[form.tag_field] = form.tag
        for field in msgspec.structs.fields(value):
            own = getattr(value, field.name)
            if own != _default(field) and not _is_dispensable(field):
                found[field.encode_name] = without_defaults(own)
        return found
    if isinstance(value, list | tuple):
        return [without_defaults(one) for one in value]
    if isinstance(value, dict):
        return {key: without_defaults(one) for key, one in value.items()}
    return value


def _is_dispensable(field: Any) -> bool:
    # Other structs may have a required field of the same name.
    return field.name in DISPENSABLE and not field.required


def _default(field: Any) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
