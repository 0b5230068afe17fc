"""Tests forwarded calls at a vLLM worker: the body that the server gets, and the parts of its
response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moonpool.protocol.messages import ForwardedCall
from moonpool.types import FinishReason
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.forwarded import OWN_FIELDS, end_of, forwarded_body, read_part
from tests.unit.vllm.test_vllm_instance import work


def sent(body: bytes, **others: Any) -> dict[str, Any]:
    call = ForwardedCall(path="/v1/chat/completions", body=body)
    found: dict[str, Any] = json.loads(forwarded_body(work("a", call=call, **others), "own", b"l"))
    return found


def test_the_body_is_the_clients_but_for_what_the_head_decides() -> None:
    given = {"model": "m", "messages": [{"x": [1.5, None, "é"]}], "stream": True}
    steering = {name: {"remote_host": "evil"} for name in OWN_FIELDS}
    assert sent(json.dumps(given | steering).encode()) == given | {"model": "own"}
    twice = b'{"kv_transfer_params": 1, "model": "x", "kv_transfer_params": {"a": 2}}'
    assert sent(twice) == {"model": "own"}
    assert sent(b'{"model":"m"}', adapter="poet")["model"] == "poet"


def test_a_tenant_has_a_salt_that_its_client_cannot_choose() -> None:
    body = json.dumps({"cache_salt": "of another tenant"}).encode()
    assert "cache_salt" not in sent(body)
    one, other = (sent(body, tenant=name)["cache_salt"] for name in ("a", "b"))
    assert one != other
    assert "another" not in one


def test_what_cannot_be_sent_is_one_line() -> None:
    with pytest.raises(DialectError, match="no JSON object") as raised:
        sent(b"[1]")
    assert raised.value.refused
    with pytest.raises(DialectError, match="send the request again"):
        sent(b"{}", num_prompt_tokens=3)


def test_parts_are_counted_as_tokens() -> None:
    event = read_part(work("a"), b"text/event-stream\ndata: {}\n\n")
    assert [t.payload for t in event.tokens] == [b"text/event-stream\ndata: {}\n\n"]
    later = read_part(work("a"), b"data: {}\n\n")
    assert len(later.tokens) == 1
    usage = {"usage": {"completion_tokens": 5, "prompt_tokens": 9}}
    whole = read_part(work("a"), b"application/json\n" + json.dumps(usage).encode())
    assert len(whole.tokens) == 5
    assert whole.tokens[0].payload.startswith(b"application/json\n")
    for strange in (b"[]", b'{"usage":null}', b'{"usage":{"completion_tokens":"x"}}', b"\xff"):
        assert len(read_part(work("a"), b"application/json\n" + strange).tokens) == 1
    assert end_of(work("a")).finish is FinishReason.STOP
