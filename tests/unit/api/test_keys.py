"""Tests API keys: their sources, and the rights of a tenant compared with the operator's."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
from scripted_head import ScriptedHead, call

from moonpool.api.keys import ApiKeys, KeyFileError, KeyRing, TenantLimits, collect_keys, read_keys
from moonpool.api.serving_backend import ApiOptions

ROOT = Path(__file__).parents[3]
KEYS_MODULE = ROOT / "src" / "moonpool" / "api" / "keys.py"
FILE = """
# key   tenant  share
sk-1    search  2
sk-2
sk-3    chat    # a comment
"""
LIMITED = """
sk-1    search  share=2 priority=-1
sk-2    bulk    requests_per_s=0.5 tokens_per_s=2000 cache=0.25
sk-3    bulk    3 priority=5
"""
OPTIONS = ApiOptions(
    api_keys={"k-ann": "ann", "k-bob": "bob", "k-op": "admin"}, operators=frozenset({"admin"})
)
DRAIN = {"instance_id": "prefill-1"}


def ask(path: str, key: str, body: Any = None, **more: Any) -> Any:
    head = more.pop("head", None) or ScriptedHead()
    headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
    method = "GET" if body is None else "POST"
    return call(head, path, body, method=method, headers=headers, options=OPTIONS, **more)


def test_keys_of_all_sources_are_joined() -> None:
    keys = collect_keys(("flag",), FILE, "operator")
    assert keys.tenants == {
        "flag": "key0",
        "sk-1": "search",
        "sk-2": "key2",
        "sk-3": "chat",
        "operator": "admin",
    }
    assert keys.shares == {"search": 2.0}
    assert keys.operators == {"admin"}


def test_keys_of_one_tenant_share_its_limits() -> None:
    keys = collect_keys((), LIMITED, "operator")
    assert keys.limits == {
        "search": TenantLimits(share=2.0, priority=-1),
        "bulk": TenantLimits(3.0, 0.25, 5, 0.5, 2000.0),
    }
    assert keys.shares == {"search": 2.0, "bulk": 3.0}
    assert keys.cache_shares == {"bulk": 0.25}


def test_who_is_the_operator() -> None:
    assert ApiKeys().operators == frozenset()
    assert collect_keys(("one",), "", "").operators == {"key0"}, "one key is the operator's"
    assert collect_keys(("one", "two"), "", "").operators == frozenset()
    assert collect_keys((), "k admin\nl other", "").operators == {"admin"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k a 0", "line 1: a share"),
        ("k a much", "line 1: a share"),
        ("k a nan", "line 1: a share"),
        ("k a/b", "line 1: a tenant's name"),
        ("k a 1 2", "line 1: after key and tenant come limits as NAME=NUMBER"),
        ("k a share=1 share=2", "line 1 has share twice"),
        ("k a 1 share=2", "line 1 has share twice"),
        ("k a shares=2", "line 1: after key and tenant"),
        ("k a cache=1.5", "line 1: cache is a share"),
        ("k a cache=0", "line 1: cache is a share"),
        ("k a priority=0.5", "line 1: a priority is a whole number"),
        ("k a priority=nan", "line 1: a priority is a whole number"),
        ("k a priority=1e9", "line 1: a priority is a whole number"),
        ("k a requests_per_s=-1", "line 1: requests_per_s is a number above 0"),
        ("k a requests_per_s=inf", "line 1: requests_per_s is a number above 0"),
        ("k\n\nk", "line 3 repeats"),
        ("kéy", "ASCII"),
        ("sha256:12", "64 hexadecimal"),
    ],
)
def test_malformed_lines_are_named_and_the_key_is_not(text: str, words: str) -> None:
    with pytest.raises(KeyFileError, match=words) as caught:
        collect_keys((), text.replace("k", "s3cret"), "")
    assert "s3cret" not in str(caught.value)


def test_the_server_reads_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text(FILE)
    monkeypatch.setenv("MOONPOOL_API_KEY", "env-1,env-2")
    monkeypatch.setenv("MOONPOOL_ADMIN_KEY", "op")
    found = read_keys((), str(path), os.environ)
    assert set(found.tenants) == {"sk-1", "sk-2", "sk-3", "env-1", "env-2", "op"}
    path.write_text("a b c d")
    with pytest.raises(KeyFileError, match="line 1: a share"):
        read_keys((), str(path), os.environ)
    with pytest.raises(KeyFileError, match="cannot read the API keys"):
        read_keys((), str(tmp_path / "none"), os.environ)


def test_a_ring_keeps_no_key() -> None:
    ring = KeyRing({"secret-key": "ann"})
    assert ring.tenant_of(b"secret-key") == "ann"
    assert ring.tenant_of(b"secret-keY") is None
    assert ring.tenant_of(b"") is None
    assert "secret-key" not in repr(vars(ring))


def test_a_hashed_key_admits_the_key_and_not_its_digest() -> None:
    hashed = f"sha256:{hashlib.sha256(b'secret-key').hexdigest()}"
    ring = KeyRing(collect_keys((), f"{hashed} ann", "").tenants)
    assert ring.tenant_of(b"secret-key") == "ann"
    assert ring.tenant_of(hashed.encode()) is None


def test_a_tenant_sees_its_own_and_the_operator_sees_all() -> None:
    assert ask("/cluster", "k-ann").json() == {"instances": [], "tenant": "ann"}
    assert ask("/cluster", "k-op").json() == {"instances": []}
    for path in ("/cluster/hot", "/beliefs"):
        refused = ask(path, "k-ann")
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "admin_key_required"
        assert ask(path, "k-op").status_code == 200
    assert ask("/server_info", "k-ann").json() == {"model": "fake", "config": {"slo": None}}
    assert ask("/server_info", "k-op").json() == {"model": "fake"}
    head = ScriptedHead()
    head.explanations["ann/r"] = {"tenant": "ann"}
    assert ask("/explain/r", "k-ann", head=head).json()["request_id"] == "r"
    assert ask("/explain/r", "k-bob", head=head).status_code == 404
    assert ask("/explain/r?tenant=ann", "k-bob", head=head).status_code == 404
    assert ask("/explain/r?tenant=ann", "k-op", head=head).status_code == 200


STEERING = [
    ("k-op", {}, 200),
    ("k-op", {"host": "localhost:8000"}, 200),
    ("k-op", {"host": "[::1]:8000"}, 200),
    ("k-op", {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 403),
    ("k-op", {"sec-fetch-site": "same-origin"}, 403),
    ("k-op", {"x-forwarded-for": "127.0.0.1"}, 403),
    ("k-op", {"forwarded": "for=127.0.0.1"}, 403),
    ("k-op", {"x-real-ip": "127.0.0.1"}, 403),
    ("k-op", {"via": "1.1 proxy"}, 403),
    ("k-ann", {}, 403),
    ("k-op", {"host": "evil.example"}, 403),
    ("k-op", {"host": "127.0.0.1.evil.example"}, 403),
    ("k-op", {"origin": "http://evil.example"}, 403),
    ("k-op", {"origin": "null"}, 403),
    ("k-op", {"content-type": "text/plain"}, 415),
    ("k-op", {"content-type": ""}, 415),
]


@pytest.mark.parametrize(("key", "headers", "status"), STEERING)
def test_only_the_operator_drains_and_no_web_page(
    key: str, headers: dict[str, str], status: int
) -> None:
    head = ScriptedHead()
    found = ask("/cluster/drain", key, DRAIN, head=head, headers={"host": "127.0.0.1", **headers})
    assert found.status_code == status, found.text
    assert bool(head.drained) == (status == 200)


@pytest.mark.parametrize(("key", "headers", "status"), STEERING)
def test_only_the_operator_upgrades_and_no_web_page(
    key: str, headers: dict[str, str], status: int
) -> None:
    head = ScriptedHead()
    found = ask("/cluster/upgrade", key, {}, head=head, headers={"host": "127.0.0.1", **headers})
    assert found.status_code == (202 if status == 200 else status), found.text
    assert head.num_upgrades == (status == 200)


def test_every_example_of_a_key_file_names_its_limits() -> None:
    """A bare number is allowed as a share, but the examples must show only the form with names."""
    texts = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py"), KEYS_MODULE]
    found = 0
    for path in texts:
        for line in re.findall(
            r"^ *((?:sk-|sha256:)[\w.]+ +[\w-]+ +\S.*)$", path.read_text(), re.M
        ):
            found += 1
            assert all("=" in word for word in line.split()[2:]), f"{path.name}: {line}"
    assert found >= 5
