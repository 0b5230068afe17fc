"""Tests the SLOs that follow from a call's headers and tenant."""

from __future__ import annotations

from typing import Any

import httpx
from scripted_head import ScriptedHead, call

from moonpool.api.serving_backend import ApiOptions
from moonpool.config.slo import SloClass, SloConfig


def test_a_call_has_the_levels_of_its_class() -> None:
    head = ScriptedHead()
    chat = SloClass(name="chat", ttft_s=2.0, tbt_s=0.1)
    head.slo = SloConfig(ttft_s=30.0, classes=(chat, SloClass(name="ann", ttft_s=9.0, tbt_s=1.0)))
    options = ApiOptions(api_keys={"sk-a": "ann", "sk-b": "bob"})

    def asked(key: str, **headers: str) -> httpx.Response:
        own = {name.replace("_", "-"): text for name, text in headers.items()}
        body: dict[str, Any] = {"prompt": "x", "cache_salt": "s"}
        keyed = {"authorization": f"Bearer {key}"}
        return call(head, "/v1/completions", body, headers=own | keyed, options=options)

    asked("sk-a")
    asked("sk-b")
    asked("sk-a", x_slo_class="chat")
    asked("sk-a", x_slo_class="default")
    asked("sk-b", x_slo_class="chat", x_slo_ttft_ms="500")
    named = [request.slo.class_name for request in head.requests]
    assert named == ["ann", "default", "chat", "default", "chat"]
    times = [(request.slo.ttft_s, request.slo.tbt_s) for request in head.requests]
    assert times == [(9.0, 1.0), (30.0, 0.5), (2.0, 0.1), (30.0, 0.5), (0.5, 0.1)]
    assert [request.slo.assumed for request in head.requests[:2]] == [(), ("tbt_s",)]
    refused = asked("sk-a", x_slo_class="chats")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-slo-class"
    assert "ann" not in refused.text, "classes may have names of tenants"
