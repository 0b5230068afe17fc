"""Tests the reading of a call's headers."""

from __future__ import annotations

import pytest

from moonpool.api.errors import ApiError
from moonpool.api.models.forwarded_bodies import ForwardedBody
from moonpool.config.slo import SloClass, SloConfig
from moonpool.epp.call_headers import dropped_reason, read_program, read_terms, request_id_of
from moonpool.types import PRIORITY_RANGE, ProgramContext, Slo

USUAL = SloConfig()
CHAT = SloClass(name="chat", ttft_s=2.0, tbt_s=0.1)
WITH_CLASSES = SloConfig(classes=(CHAT, SloClass(name="team/a", ttft_s=60.0, tbt_s=1.0)))


def test_slos_have_a_name_and_an_older_one() -> None:
    for ttft, tpot in (
        ("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"),
        ("x-slo-ttft-ms", "x-slo-tpot-ms"),
    ):
        found = read_terms({ttft: "1500", tpot: "40"}, USUAL, 600.0, {})
        assert found.slo == Slo(ttft_s=1.5, tbt_s=0.04)
        one = read_terms({ttft: "1500"}, USUAL, 600.0, {})
        assert one.slo == Slo(ttft_s=1.5, tbt_s=0.5, tbt_stated=False)
    both = {"x-llm-d-slo-ttft-ms": "1000", "x-slo-ttft-ms": "2000"}
    assert read_terms(both, USUAL, 600.0, {}).slo.ttft_s == 1.0
    assert read_terms({}, USUAL, 600.0, {}).slo == USUAL.usual


def test_a_call_names_its_program_as_at_the_front() -> None:
    body = ForwardedBody()
    claude = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "host": "h"}
    found = read_program(claude, body)
    assert found == ProgramContext(program_id="s:a", parent_id="s", root_id="s")
    assert read_program({"host": "h"}, body) is None
    ends = {"x-session-id": "u", "x-program-ends": "true"}
    assert read_program(ends, body) == ProgramContext(program_id="u", ends=True)
    named = ForwardedBody(vllm_xargs={"agentic_context": '{"program_id": "p"}'})
    found = read_program({}, named)
    assert found is not None and found.program_id == "p"


def test_objectives_have_a_name_and_an_older_one() -> None:
    known = {"fast": 7, "slow": -3, "odd": 1 << 40}
    for name in ("x-llm-d-inference-objective", "x-gateway-inference-objective"):
        priorities = [
            read_terms({name: one}, USUAL, 600.0, known).priority
            for one in ("fast", "slow", "unknown", "odd")
        ]
        assert priorities == [-7, 3, 0, PRIORITY_RANGE[0]]  # a lower priority goes first


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, "default"),
        ({"x-slo-class": "chat"}, "chat"),
        ({"x-slo-class": ""}, "default"),
        ({"x-llm-d-inference-objective": "chat"}, "chat"),
        ({"x-llm-d-inference-objective": "none of ours"}, "default"),
        ({"x-gateway-inference-fairness-id": "team/a"}, "team/a"),
        ({"x-gateway-inference-fairness-id": "team/b"}, "default"),
        (
            {
                "x-llm-d-inference-objective": "chat",
                "x-gateway-inference-fairness-id": "team/a",
            },
            "chat",
        ),
        ({"x-slo-class": "team/a", "x-llm-d-inference-objective": "chat"}, "team/a"),
        ({"x-slo-class": "default", "x-llm-d-inference-objective": "chat"}, "default"),
    ],
)
def test_a_call_belongs_to_a_class(headers: dict[str, str], name: str) -> None:
    found = read_terms(headers, WITH_CLASSES, 600.0, {"chat": 3})
    levels = {one.name: one.slo for one in WITH_CLASSES.classes}
    assert found.slo.class_name == name
    assert found.slo == levels.get(name, WITH_CLASSES.slo_of("", ""))
    asked = headers.get("x-llm-d-inference-objective")
    assert found.priority == (-3 if asked == "chat" else 0), "it stays a priority"
    own = read_terms(headers | {"x-slo-ttft-ms": "70"}, WITH_CLASSES, 600.0, {}).slo
    assert (own.ttft_s, own.tbt_s, own.class_name) == (0.07, found.slo.tbt_s, name)


@pytest.mark.parametrize("levels", [USUAL, WITH_CLASSES])
def test_a_class_that_nobody_made_is_refused(levels: SloConfig) -> None:
    with pytest.raises(ApiError, match="x-slo-class names none of the classes") as refused:
        read_terms({"x-slo-class": "chats"}, levels, 600.0, {})
    assert refused.value.status == 400
    assert read_terms({"x-slo-class": "default"}, levels, 600.0, {}).slo.ttft_s == 30.0


def test_a_time_limit_only_shortens() -> None:
    assert read_terms({"x-request-timeout-ms": "2000"}, USUAL, 600.0, {}).timeout_s == 2.0
    assert read_terms({"x-request-timeout-ms": "9e8"}, USUAL, 600.0, {}).timeout_s == 600.0


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "1e13"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_terms({"x-slo-ttft-ms": text}, USUAL, 600.0, {})
    assert refused.value.status == 400


def test_ids_of_clients_are_taken_if_they_are_short_and_plain() -> None:
    assert request_id_of({"x-request-id": "a-1"}) == "a-1"
    for bad in ("", "a b", "x" * 200, "a/b", "a~1"):
        assert request_id_of({"x-request-id": bad}) != bad


def test_refusals_have_the_reasons_of_llm_d() -> None:
    expected = {429: "rejected-saturated", 503: "rejected-no-endpoints", 404: ""}
    for status, reason in expected.items():
        assert dropped_reason(ApiError("no", status=status)) == reason
    stopping = ApiError("no", status=503, code="server_stopping")
    assert dropped_reason(stopping) == "rejected-shutting-down"


def test_the_tenant_that_pays_has_a_name_and_an_older_one() -> None:
    for name in ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"):
        assert read_terms({name: "team-a"}, USUAL, 600.0, {}).payer == "team-a"
        # No name may equal the salt of another tenant, and no name may be long.
        assert "/" not in read_terms({name: "a/b/" + "c" * 999}, USUAL, 600.0, {}).payer
        assert len(read_terms({name: "c" * 999}, USUAL, 600.0, {}).payer) == 128
    assert read_terms({}, USUAL, 600.0, {}).payer == ""
