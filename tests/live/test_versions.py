"""Tests processes of two releases in one cluster: they use the versions that both speak, or
disconnect with a one-line message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.protocol.versions import NEWEST_PROTOCOL
from tests.live.conftest import MODEL, SMALL
from tests.live.test_parts import PROMPT, Parts

_BEGIN = """
import secrets, sys
from moonpool.cli.main import cli
from moonpool.protocol.versions import Agreed, VersionRange, Versions, state_versions
from moonpool.link import auth
"""
FORMER = (
    _BEGIN
    + """
auth._nonce = lambda versions: secrets.token_bytes(32)
auth._agree = lambda ours, theirs, versions: Agreed(10, 1)
cli()
"""
)
"""Acts as a process of protocol 10, which sends no versions and reads none."""
FAR = (
    _BEGIN
    + """
auth._nonce = lambda versions: state_versions(
    Versions(VersionRange(90, 91), VersionRange(1, 1))
) + secrets.token_bytes(20)
cli()
"""
)
"""Acts as a process of a much later release."""


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.end()


def worker(parts: Parts, role: str, name: str) -> list[str]:
    head = f"127.0.0.1:{parts.head_port}"
    return ["worker", "--role", role, "--head", head, "--name", name]


@pytest.mark.long
def test_a_worker_of_the_release_before_serves_and_one_far_away_is_refused(parts: Parts) -> None:
    parts.start_head()
    parts.start_script(FORMER, *worker(parts, "decode", "old"))
    parts.start_worker("prefill", "new")
    client = parts.wait_until_healthy()
    answer = client.post("/v1/completions", json=PROMPT)
    assert answer.json()["usage"]["completion_tokens"] == 8
    found = {i["instance_id"]: i for i in client.get("/cluster").json()["instances"]}
    assert (found["old"]["protocol"], found["old"]["release"]) == (10, None)
    assert (found["new"]["protocol"], found["new"]["release"]) != (10, None)
    assert found["new"]["protocol"] == NEWEST_PROTOCOL

    far = parts.start_script(FAR, *worker(parts, "decode", "far"))
    _, words = far.communicate(timeout=60)
    assert far.returncode == 1
    (line,) = [line for line in words.splitlines() if "speaks protocol" in line]
    assert "head speaks protocol 10 to 11, far 90 to 91: upgrade head" in line


@pytest.mark.long
def test_a_new_worker_serves_a_head_of_the_release_before(parts: Parts) -> None:
    ports = ["--head-port", str(parts.head_port), "--port", str(parts.port)]
    parts.start_script(FORMER, "head", MODEL, *SMALL, *ports)
    parts.start_worker("mixed", "new")
    client = parts.wait_until_healthy()
    answer = client.post("/v1/completions", json=PROMPT)
    assert answer.json()["usage"]["completion_tokens"] == 8
