"""Tests the sources of a picker, by its flags."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

pytest.importorskip("kmock")

from test_inference_pool import PODS, POOLS, a_cluster, pod, pool

from moonpool.cli.epp import open_sources
from moonpool.discovery.endpoint import Listing, SourceError
from tests.cli_runner import invoke


def file_of(folder: Path, name: str) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"endpoints": [{"name": name, "address": "10.1.0.1", "port": "8"}]}))
    return str(path)


async def heard(listed: tuple[str, ...], pool_name: str, url: str, *names: str) -> Listing:
    """Returns the first listing that has exactly these endpoints."""
    listings: asyncio.Queue[Listing] = asyncio.Queue()
    source = open_sources(listed, (), pool_name, "ns", url)
    following = asyncio.create_task(source.follow(listings.put_nowait))
    try:
        async with asyncio.timeout(60):
            while True:
                found = await listings.get()
                if {each.name for each in found.endpoints} == set(names):
                    return found
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def sources_of_all_kinds(folder: Path) -> None:
    async with a_cluster(follows=False) as cluster:
        await cluster.write("POST", POOLS, pool(8000))
        await cluster.write("POST", PODS, pod("a", "10.0.0.1"))
        one, two = file_of(folder, "one"), file_of(folder, "two")
        labelled = "kube://ns/app=vllm?port=8001"
        assert (await heard((one,), "", "", "one")).is_whole
        found = await heard((one, two, labelled), "", cluster.url, "one", "two", "a")
        assert {each.address for each in found.endpoints} == {"10.1.0.1:8", "10.0.0.1:8001"}
        found = await heard((one,), "llama", cluster.url, "one", "a")
        assert found.fails_open is False, "the pool says so"
        own = f"{labelled}&api={cluster.url}"
        assert await heard((own,), "", "http://127.0.0.1:1", "a")


def test_sources_are_named_as_at_serve_and_join(tmp_path: Path) -> None:
    asyncio.run(sources_of_all_kinds(tmp_path))


@pytest.mark.parametrize("text", ["http://10.0.0.1:8000", "kube://ns/app=vllm", "dns://name"])
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="is no source: use"):
        open_sources((text,), (), "", "", "")
    for flag in ("--endpoints", "--vllm-endpoints"):
        done = invoke("epp", flag, text, "--metrics-port", "0")
        assert done.exit_code != 0 and "is no source: use" in done.output


def test_a_picker_needs_a_source() -> None:
    done = invoke("epp")
    assert done.exit_code != 0 and "name a source of endpoints" in done.output
