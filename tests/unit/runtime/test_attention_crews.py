"""Who serves whom: places are kept, spares step in."""

from __future__ import annotations

from moonpool.kvcache.transfers import PeerAddress
from moonpool.runtime.attention_crews import Crews
from moonpool.types import InstanceId

ONE, OTHER = InstanceId("decode-0"), InstanceId("decode-1")


def at(name: str, port: int = 1) -> PeerAddress:
    return PeerAddress(
        instance_id=InstanceId(name), host_id="h", unix_name="", tcp_host="x", tcp_port=port
    )


def test_an_instance_starts_when_its_crew_is_there() -> None:
    crews = Crews(2)
    assert crews.join(at("a")) is None
    assert crews.crew(ONE) is None
    crews.join(at("b"))
    crews.join(at("c"))
    assert crews.crew(ONE) == (at("a"), at("b"))
    assert crews.crew(OTHER) is None
    assert crews.owners() == {"a": ONE, "b": ONE, "c": None}
    assert crews.crew(ONE) == (at("a"), at("b"))  # again, for its successor


def test_a_lost_worker_is_replaced_by_a_spare_or_by_itself() -> None:
    crews = Crews(2)
    for name in ("a", "b", "c"):
        crews.join(at(name))
    crews.crew(ONE)
    assert crews.lose("a") == (ONE, 0, at("c"))
    assert crews.crew(ONE) == (at("c"), at("b"))
    assert crews.lose("b") is None
    assert crews.crew(ONE) is None
    assert crews.join(at("b", 2)) == (ONE, 1)
    assert crews.crew(ONE) == (at("c"), at("b", 2))
    assert crews.join(at("a")) is None  # its place is taken: a spare now
    assert crews.lose("b") == (ONE, 1, at("a"))


def test_a_newcomer_takes_the_place_of_who_is_gone() -> None:
    crews = Crews(1)
    crews.join(at("a"))
    crews.crew(ONE)
    crews.lose("a")
    assert crews.join(at("new")) == (ONE, 0)
    assert crews.crew(ONE) == (at("new"),)


def test_a_new_head_hears_who_has_whom() -> None:
    crews = Crews(1)
    crews.join(at("a"))
    crews.join(at("b"))
    assert crews.crew(OTHER) == (at("a"),)
    crews.remember(ONE, ("a",))
    assert crews.crew(ONE) == (at("a"),)
    assert crews.crew(OTHER) == (at("b"),)
