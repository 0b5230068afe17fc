"""The live page is self-contained, needs a key, and makes no work while nobody looks."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from scripted_head import ScriptedHead, call, served
from starlette.types import Message

from moonpool.api.cluster_view import own_view
from moonpool.api.errors import ApiError
from moonpool.api.http_context import HttpContext
from moonpool.api.page.live_page import MAX_VIEWERS, LivePage
from moonpool.api.serving_backend import ApiOptions

OPTIONS = ApiOptions(
    api_keys={"k-ann": "ann", "k-bob": "bob", "k-op": "admin"}, operators=frozenset({"admin"})
)


def ask(path: str, key: str = "", options: ApiOptions | None = OPTIONS) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return call(ScriptedHead(), path, method="GET", headers=headers, options=options)


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_is_self_contained_and_open(path: str) -> None:
    answer = ask(path)
    assert answer.headers["content-type"].startswith("text/html")
    assert len(answer.content) < 300_000
    text = answer.text
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\"'\s]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a name space, which nobody loads"
    assert not re.search(r"<(link|script|img|iframe)[^>]*(src|href)=\"(?!data:)", text)
    assert not re.search(r"@import|url\(", text)
    assert "innerHTML" not in text, "texts of clients must not become elements"
    assert "localStorage" not in text and "sessionStorage" not in text and "cookie" not in text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_the_page_of_the_routes_is_a_link() -> None:
    (target,) = re.findall(r'<a href="([^"]*)">/docs</a>', ask("/").text)
    assert ask(f"/{target}").text == ask("/docs").text


@pytest.mark.long
def test_events_need_a_key_and_show_its_tenant() -> None:
    assert ask("/cluster/events").status_code == 401
    assert ask("/cluster/events", "k-other").status_code == 401
    assert frames_of(ask("/cluster/events", "k-ann"))[0]["tenant"] == "ann"
    assert frames_of(ask("/cluster/events", "k-op"))[0]["tenant"] is None
    assert frames_of(ask("/cluster/events", options=None))[0]["tenant"] is None


def frames_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks[-2:] == ["event: end\ndata: {}", ""], "the end of the server ends the stream"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


class Viewer:
    """Is one viewer of a page, without a socket."""

    def __init__(self, page: LivePage, tenant: str = "") -> None:
        self.received: list[bytes] = []
        self.left, self.seen = asyncio.Event(), asyncio.Event()
        scope = {"type": "http", "headers": []}
        context = HttpContext(scope, self._receive, self._send)
        context.tenant, context.is_operator = tenant, not tenant
        self.task = asyncio.create_task(page.events(context))

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.received.append(message["body"])
            self.seen.set()


def test_viewers_share_frames_are_bounded_and_leave_nothing() -> None:
    async def run() -> None:
        head = ScriptedHead()
        head.most_views = 1000
        page = LivePage(head, own_view(head))
        await asyncio.sleep(0)
        assert head.num_views == 0, "nothing is computed while nobody looks"
        viewers = [Viewer(page) for _ in range(MAX_VIEWERS - 1)] + [Viewer(page, "ann")]
        for viewer in viewers:
            await asyncio.wait_for(viewer.seen.wait(), 60)
        assert len({viewer.received[0] for viewer in viewers[:-1]}) == 1
        assert b'"tenant":"ann"' in viewers[-1].received[0]
        with pytest.raises(ApiError, match="watch this server already"):
            await Viewer(page).task
        for viewer in viewers:
            viewer.left.set()
        await asyncio.wait(
            [asyncio.create_task(asyncio.wait_for(v.task, 60)) for v in viewers], timeout=60
        )
        views = head.num_views
        last = Viewer(page)
        await asyncio.wait_for(last.seen.wait(), 60)
        assert head.num_views == views + 1, "there is room again"
        last.left.set()
        await asyncio.wait([last.task], timeout=60)

    asyncio.run(run())


@pytest.mark.long
def test_a_real_connection_gets_frame_after_frame() -> None:
    head = ScriptedHead()
    head.most_views = 2
    with served(head) as url, httpx.stream("GET", f"{url}/cluster/events", timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith('data: {"')]
    assert [json.loads(line[6:])["view"] for line in lines] == [1, 2]
