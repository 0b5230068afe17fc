"""Tests that the memory of a picker for bodies is bounded, and is given back."""

from __future__ import annotations

import pytest

from moonpool.api.errors import ApiError
from moonpool.api.serving_backend import RequestRefused
from moonpool.epp.exchange import BODIES, BodyRoom


def test_one_body_is_bounded() -> None:
    room = BodyRoom(100)
    held = room.share()
    held.add(b"x" * 60)
    held.add(b"y" * 40)
    assert held.whole() == b"x" * 60 + b"y" * 40
    with pytest.raises(ApiError) as refused:
        held.add(b"z")
    assert refused.value.status == 413


def test_all_bodies_together_are_bounded() -> None:
    room = BodyRoom(100)
    many = [room.share() for _ in range(BODIES)]
    for each in many:
        each.add(b"x" * 100)
    late = room.share()
    with pytest.raises(RequestRefused) as refused:
        late.add(b"x")
    assert refused.value.refusal.status == 503
    many[0].close()
    many[0].close()
    late.add(b"x")
    for each in (*many, late):
        each.close()
    assert room.left_bytes == BODIES * 100
