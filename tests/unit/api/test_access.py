"""Tests the table of routes: who may call which route, with each kind of key, from this machine,
from another machine, through a proxy, and from a web page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from relay import relayed
from scripted_head import ScriptedHead, call, served

from moonpool.api.access import admission, route_rules
from moonpool.api.access.local_client import why_not_local
from moonpool.api.access.route_rules import RULES, NoRuleError, RouteRule
from moonpool.api.app import make_app
from moonpool.api.page import live_page
from moonpool.api.serving_backend import ApiOptions
from moonpool.protocol.model_offer import POOLING_PATHS

KEYS = {"k-ann": "ann", "k-bob": "bob", "k-op": "admin"}
KEYED = ApiOptions(api_keys=KEYS, operators=frozenset({"admin"}))
SENT_KEYS = {"no": "", "wrong": "k-nobody", "tenant": "k-ann", "operator": "k-op"}
POSTED = {
    "/reset_prefix_cache",
    "/tokenize",
    "/detokenize",
    "/cluster/drain",
    "/cluster/upgrade",
    *POOLING_PATHS,
}
PAGE = {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
HEADERS: dict[str, dict[str, str]] = {
    "local": {},
    "by a proxy": {},
    "by a proxy that says so": {"x-forwarded-for": "203.0.113.9"},
    "from a page": PAGE,
    "by a script of a page": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    "from a page under another name": {"host": "evil.example:8000"},
    "from a page of another port": {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:3000"},
}
FROM_PAGES = [way for way in HEADERS if "page" in way]


def expected(rule: RouteRule, key: str, way: str) -> set[str]:
    """Returns the codes of the refusals that the table allows, or none if the request is admitted.
    `key` is "" on a server without keys."""
    if rule.callers == "everybody":
        return set()
    if key in ("no", "wrong"):
        return {"invalid_api_key"}
    if key == "tenant" and rule.callers == "the operator":
        return {"admin_key_required"}
    found = set()
    is_unproven = way == "by a proxy" and not key
    if rule.is_local and (is_unproven or way == "by a proxy that says so"):
        found.add("not_local")
    if way in FROM_PAGES and (rule.pages == "none" or (rule.pages == "own" and not key)):
        found.add("foreign_origin")
    return found


def ask(client: httpx.Client, rule: RouteRule, headers: dict[str, str]) -> httpx.Response:
    path = rule.path.replace("{model_id:path}", "m").replace("{request_id}", "r")
    if rule.path in POSTED or (path.startswith("/v1/") and not path.startswith("/v1/models")):
        body = None if rule.path == "/reset_prefix_cache" else {}
        return client.post(path, json=body, headers=headers)
    return client.get(path, headers=headers)


def code_of(answer: httpx.Response) -> str:
    """Returns why a request was not admitted, or "" if it was."""
    if answer.status_code not in (401, 403):
        return ""
    error = answer.json()["error"]  # errors in Anthropic's form have no code
    text = f"{error.get('code')} {error['message']}"
    kinds = {
        "invalid_api_key": "key is missing or invalid",
        "admin_key_required": "operator's key, because",
        "not_local": "own machine only",
        "foreign_origin": "web page",
    }
    return next(code for code, words in kinds.items() if words in text)


@pytest.fixture(scope="module")
def fast_frames() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_page, "FRAME_S", 0.0)
        yield


@pytest.fixture(scope="module", params=[KEYED, None], ids=["keys", "no keys"])
def servers(request: Any, fast_frames: None) -> Iterator[tuple[bool, str, str]]:
    """Yields whether the server has keys, its URL, and the URL of a proxy before it."""
    head = ScriptedHead()
    with served(head, request.param) as url, relayed(url) as proxy:
        yield request.param is not None, url, proxy


@pytest.mark.parametrize("way", HEADERS)
def test_each_route_admits_whom_the_table_says(servers: tuple[bool, str, str], way: str) -> None:
    has_keys, url, proxy = servers
    keys = SENT_KEYS if has_keys else {"": ""}
    with httpx.Client(base_url=proxy if way == "by a proxy" else url, timeout=60) as client:
        for rule, (key, sent) in product(RULES.values(), keys.items()):
            headers = HEADERS[way] | ({"authorization": f"Bearer {sent}"} if sent else {})
            code, wanted = code_of(ask(client, rule, headers)), expected(rule, key, way)
            assert code in wanted if wanted else not code, (rule.path, key, code, wanted)


def test_each_route_has_a_rule_and_each_rule_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {route.path for route in make_app(ScriptedHead()).routes}  # type: ignore[attr-defined]
    short = {
        path for path in routes - RULES.keys() if f"/v1{path}" in RULES
    }  # adds the same routes without /v1
    assert routes - short == RULES.keys()
    for path in RULES:
        fewer = {other: rule for other, rule in RULES.items() if other != path}
        monkeypatch.setattr(route_rules, "RULES", fewer)
        with pytest.raises(NoRuleError, match="has no line in RULES"):
            make_app(ScriptedHead())


def test_the_document_says_what_the_table_does() -> None:
    document = call(ScriptedHead(), "/openapi.json", method="GET").json()
    for path, rule in RULES.items():
        for operation in document["paths"][path.replace(":path}", "}")].values():
            assert ("401" in operation["responses"]) == (rule.callers != "everybody")
            assert ("403" in operation["responses"]) == (rule.callers != "everybody")
            assert (operation.get("security") == []) == (rule.callers == "everybody")
            assert f"For {rule.callers}, from {rule.words[1]}." in operation["description"]


def test_a_body_is_read_up_to_the_limit_of_its_route() -> None:
    largest = RULES["/cluster/drain"].body_bytes
    drain = json.dumps({"instance_id": "prefill-1"}).encode()
    headers = {"content-type": "application/json"}
    with served(ScriptedHead()) as url, httpx.Client(base_url=url, headers=headers) as client:
        for size, status in ((largest, 200), (largest + 1, 413)):
            answer = client.post("/cluster/drain", content=drain.ljust(size))
            assert answer.status_code == status


# Web pages:

OWN = ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "node7:8000", "a.local", "x.internal:1"]


@pytest.mark.parametrize("host", OWN)
def test_a_server_without_keys_knows_its_own_names(host: str) -> None:
    with served(ScriptedHead()) as url:
        assert httpx.get(f"{url}/cluster", headers={"host": host}).status_code == 200
        own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert httpx.get(f"{url}/cluster", headers=own).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8000", "a.local.evil.org"]
)
def test_a_name_that_a_page_may_have_is_told_from_an_own_one(host: str) -> None:
    options = ApiOptions(allowed_hosts=(host.partition(":")[0],))
    for path in ("/cluster", "/cluster/event_log", "/explain/r", "/cluster/events", "/server_info"):
        with served(ScriptedHead()) as url:
            refused = httpx.get(f"{url}{path}", headers={"host": host})
            assert refused.status_code == 403 and "--allowed-host" in refused.text
    with served(ScriptedHead(), options) as url:
        assert httpx.get(f"{url}/cluster", headers={"host": host}).status_code == 200


def test_a_name_in_the_file_of_hosts_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hosts"
    path.write_text("# a.b.c\n\n127.0.1.1 gpu.corp.example gpu # d.e.f\n0.0.0.0 ads.example\n")
    monkeypatch.setattr(admission, "_HOSTS_FILE", str(path))
    with served(ScriptedHead()) as url:
        for host, status in (("gpu.corp.example", 200), ("ads.example", 403), ("d.e.f", 403)):
            headers = {"host": f"{host}:8000"}
            assert httpx.get(f"{url}/cluster", headers=headers).status_code == status


def test_an_allowed_page_calls_and_steers_nothing() -> None:
    page = {"origin": "https://page.example", "sec-fetch-site": "cross-site"}
    for origins, status in ((("https://page.example",), 200), (("*",), 200), ((), 403)):
        head = ScriptedHead()
        with served(head, ApiOptions(allowed_origins=origins)) as url:
            body = {"prompt": "x"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=page)
            assert answer.status_code == status
            assert httpx.post(f"{url}/reset_prefix_cache", headers=page).status_code == 403
        assert head.num_drops == 0


def test_a_link_to_a_page_of_the_server_may_be_followed() -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    with served(ScriptedHead()) as url:
        assert httpx.get(f"{url}/cluster", headers=followed).status_code == 200


# Calls from this machine:

POST = "import urllib.request as r, sys; r.urlopen(r.Request(sys.argv[1], method='POST'))"
LISTENS = "import socket; s = socket.create_server(('127.0.0.1', 0)); "
UNIX = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0moonpool-%d'); s.listen(); "
ACCEPTED = (
    "import socket; s = socket.create_server(('127.0.0.1', 0));"
    " c = socket.create_connection(s.getsockname()); a, _ = s.accept(); "
)
DATAGRAMS = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('0.0.0.0', 0)); "


@pytest.mark.parametrize(
    ("before", "is_local"),
    [("", True), (LISTENS, False), (UNIX % 1, False), (ACCEPTED, False), (DATAGRAMS, False)],
)
def test_a_command_is_local_and_a_process_that_others_reach_is_not(
    before: str, is_local: bool
) -> None:
    head = ScriptedHead()
    with served(head) as url:
        line = [sys.executable, "-c", before + POST, f"{url}/reset_prefix_cache"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0) == is_local, done.stderr
    assert head.num_drops == is_local


def test_the_reason_says_what_to_do() -> None:
    with served(ScriptedHead()) as url, relayed(url) as proxy:
        answer = httpx.post(f"{proxy}/reset_prefix_cache")
        assert answer.status_code == 403
        text = answer.json()["error"]["message"]
        assert "waits for connections itself" in text and "--api-key-file" in text


def test_a_connection_that_is_unknown_is_not_local() -> None:
    assert "unknown" in why_not_local(None, ("127.0.0.1", 1))
    assert "unknown" in why_not_local(("127.0.0.1", 1), ("127.0.0.1", 2))
    assert why_not_local(("nonsense", 1), ("127.0.0.1", 2))
    assert call(ScriptedHead(), "/reset_prefix_cache").status_code == 403, "it has no socket"


# Headers:

TWICE = [
    "authorization",
    "x-api-key",
    "content-type",
    "content-encoding",
    "origin",
    "last-event-id",
    "x-request-id",
    "x-request-timeout-ms",
    "x-resume-tokens",
    "x-slo-ttft-ms",
    "x-slo-tpot-ms",
    "x-slo-class",
]


@pytest.mark.parametrize("name", TWICE)
def test_a_header_that_decides_comes_once(name: str) -> None:
    head = ScriptedHead()
    with served(head) as url:
        headers = [(name, "1"), (name.upper(), "1")]
        answer = httpx.post(f"{url}/v1/completions", content=b"{}", headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
        headers = [("accept", "a"), ("accept", "b"), ("traceparent", "x"), ("traceparent", "y")]
        body = {"prompt": "x"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer k-ann", "x-api-key": "k-bob"}, 400),
        ({"authorization": "Bearer k-ann", "x-api-key": "k-nobody"}, 400),
        ({"authorization": "Bearer k-ann", "x-api-key": "k-ann"}, 200),
        ({"x-api-key": "k-ann"}, 200),
        ({"authorization": "Bearer k-ann"}, 200),
    ],
)
def test_two_keys_of_one_request_are_the_same(headers: dict[str, str], status: int) -> None:
    answer = call(ScriptedHead(), "/v1/models", method="GET", headers=headers, options=KEYED)
    assert answer.status_code == status


def test_of_several_traceparents_none_is_used() -> None:
    one = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    options = ApiOptions(exports_traces=True)
    head = ScriptedHead()
    with served(head, options) as url:
        for headers in ([("traceparent", one)], [("traceparent", one)] * 2):
            body = {"prompt": "x"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
    alone, double = (request.trace for request in head.requests)
    assert alone is not None and alone.trace_id == one[3:35]
    assert double is None or double.trace_id != one[3:35]
