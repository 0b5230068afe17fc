"""`serve --vllm-endpoints kube://...` serves pods by label; kmock stands for the API, over real
HTTP."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("kmock")

from test_inference_pool import PODS, a_cluster, pod

from moonpool.discovery.endpoint import Endpoint, SourceError
from moonpool.discovery.pods import read_pods
from moonpool.discovery.source_text import PodSource, parse_source
from moonpool.discovery.watch import Discovery, check_source

RANKS = "moonpool.dev/data-parallel-size"


def test_pods_join_and_leave_by_their_label() -> None:
    asyncio.run(pods_join_and_leave())


async def pods_join_and_leave() -> None:
    async with a_cluster(follows=False) as cluster:
        source = f"kube://ns/app=vllm?port=8000&api={cluster.url}"
        await check_source(source)
        heard: asyncio.Queue[tuple[str, Endpoint]] = asyncio.Queue()
        discovery = Discovery(
            [source],
            lambda server: heard.put_nowait(("join", server)),
            lambda server: heard.put_nowait(("drain", server)),
        )
        running = asyncio.create_task(discovery.run())
        try:
            await cluster.write("POST", PODS, pod("b", "10.0.0.2", ready=False))
            await cluster.write("POST", PODS, pod("a", "10.0.0.1", role="prefill"))
            async with asyncio.timeout(60):
                what, server = await heard.get()
                assert (what, server.name, server.role) == ("join", "a", "prefill")
                assert server.place == "http://10.0.0.1:8000"
                await cluster.write("PATCH", f"{PODS}/b", pod("b", "10.0.0.2"))
                assert (await heard.get())[1].name == "b"
                await cluster.write("DELETE", f"{PODS}/a")
                what, server = await heard.get()
                assert (what, server.name) == ("drain", "a")
            asked = cluster.queries(PODS)
            assert all(each["labelSelector"] == "app=vllm" for each in asked)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def test_what_labels_say_holds_and_a_wrong_one_leaves_out_its_pod_alone() -> None:
    ranked, wrong = pod("a", "10.0.0.1"), pod("b", "10.0.0.2", role="dancer")
    ranked["metadata"]["labels"][RANKS] = "2"
    servers, problems = read_pods({"a": ranked, "b": wrong, "c": pod("c", "10.0.0.3")}, [8000])
    ranks = [rank.name for server in servers for rank in server.ranks()]
    assert ranks == ["a.0", "a.1", "c"]
    assert len(problems) == 1 and problems[0].startswith("the pod b: ")


@pytest.mark.parametrize(
    "text",
    [
        "kube://ns?port=8000",
        "kube://ns/app=vllm",
        "kube://ns/app=vllm?port=0",
        "kube://ns/app=vllm?port=8000&other=1",
        "kube://ns/app=vllm&x?port=8000",
        "kube://ns/app=vllm?port=8000&api=ftp://a",
    ],
)
def test_what_names_no_pods_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="use kube://NAMESPACE/LABEL=VALUE"):
        parse_source(text)


def test_a_source_names_labels_and_port() -> None:
    found = parse_source("kube:///app=vllm,tier=x?port=8000")
    assert found == PodSource("", "app=vllm,tier=x", 8000)


def test_outside_of_a_cluster_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SourceError, match="no pod of a Kubernetes cluster"):
        asyncio.run(check_source("kube:///app=vllm?port=8000"))
