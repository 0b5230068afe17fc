"""Policies from outside the package serve in a live cluster: placement and admission in the head,
eviction in the workers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from moonpool_lab.demo.local_server import ServerError
from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL
from tests.tidy.test_extending import EXAMPLES

pytestmark = pytest.mark.live

POLICIES = '''
class Last:
    """Prefills on the last instance that can."""

    def __call__(self, context):
        if context.footprint.num_tokens == 13:
            raise LookupError("thirteen")
        return int(context.possible.nonzero()[0][-1])


def no_long_answers(context):
    return "too long an answer" if context.footprint.num_tokens > 100 else None
'''


def complete(client: httpx.Client, num_tokens: int) -> httpx.Response:
    body = {"prompt": [*range(1, num_tokens + 1)], "max_tokens": 2, "temperature": 0}
    return client.post("/v1/completions", json=body)


def test_own_policies_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(POLICIES)
    (tmp_path / "deepest_first.py").write_text(EXAMPLES["deepest_first"])
    (tmp_path / "t.toml").write_text(
        '[pool]\neviction = "deepest_first:DeepestFirst"\n[conductor]\ninline_prefill = false\n'
    )
    flags = ["--prefill", "2", "--decode", "1", "--placement", "own:Last", "--config", "t.toml"]
    arguments = [MODEL, *flags, "--admission", "own:no_long_answers", *SMALL]
    with LocalServer(arguments) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        prefills = [one["instance_id"] for one in server.instances() if one["role"] == "prefill"]
        for _ in range(4):
            answer = complete(client, 40).json()
            lines = client.get(f"/explain/{answer['id']}").text
            assert f"prefill on {prefills[-1]}," in lines, lines
        rejected = complete(client, 101)
        assert rejected.status_code == 429
        assert "too long an answer" in rejected.text
        failed = complete(client, 13)
        assert failed.status_code == 500
        assert "policy of this server failed" in failed.text
        assert "own.py" not in failed.text
        assert complete(client, 40).status_code == 200, "the head serves on"
        server.stop()
        assert "own:Last failed" in server.last_words(40)


@pytest.mark.long
def test_a_policy_that_is_missing_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(ServerError, match="there is no module 'nowhere'"),
        LocalServer([MODEL, "--placement", "nowhere:Policy", *SMALL]),
    ):
        pass
