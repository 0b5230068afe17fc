"""Reads endpoints from a file in llm-d's form."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

from moonpool.discovery import endpoints_file  # noqa: E402
from moonpool.discovery.endpoint import Endpoint, Listing, SourceError  # noqa: E402
from moonpool.discovery.endpoints_file import EndpointsFile, parse_endpoints  # noqa: E402
from moonpool.types import Role  # noqa: E402

# This is the example of llm-d's own guide, with its labels.
TEXT = """
endpoints:
  - name: vllm-0
    address: "10.0.0.1"
    port: "8000"
    labels:
      model: llama-3-8b
      llm-d.ai/role: prefill
  - name: vllm-1
    namespace: inference
    address: 10.0.0.2
    port: 8000
    labels: {llm-d.ai/role: decode, moonpool.dev/kv-events-port: "5557"}
  - {name: vllm-2, address: "fd00::1", port: "8000"}
  - {name: encoder, address: 10.0.0.4, port: "8000", labels: {llm-d.ai/role: encode}}
objectives:
  - {name: premium, priority: 5}
"""


def read(text: str) -> Listing:
    return parse_endpoints(text.encode())[0]


def test_the_form_of_llm_d_is_read() -> None:
    found = read(TEXT)
    assert found.endpoints == (
        Endpoint(name="vllm-0", host="10.0.0.1", port=8000, role=Role.PREFILL),
        Endpoint(
            name="inference.vllm-1",
            host="10.0.0.2",
            port=8000,
            role=Role.DECODE,
            events_port=5557,
        ),
        Endpoint(name="vllm-2", host="fd00::1", port=8000),
    )
    assert found.objectives == {"premium": 5}
    assert found.endpoints[1].place == "http://10.0.0.2:8000,tcp://10.0.0.2:5557"
    assert found.endpoints[2].address == "[fd00::1]:8000"
    assert read(json.dumps(yaml.safe_load(TEXT))) == found  # a YAML file may contain JSON


@pytest.mark.parametrize(
    "entry",
    [
        "{name: a, address: host/example, port: '1'}",
        "{name: a, address: 10.0.0.1, port: '0'}",
        "{name: a, address: 10.0.0.1, port: '65536'}",
        "{name: a, address: 10.0.0.1, port: '8000x'}",
        "{name: a, address: 'fe80::1%eth0', port: '8000'}",
        "{address: 10.0.0.1, port: '8000'}",
        "{name: a, address: 10.0.0.1, port: '1', labels: {moonpool.dev/kv-events-port: x}}",
        "[]",
        "{name: a, address: 10.0.0.1, port: 0x%s}" % ("f" * 5000),
        "{name: a, address: 10.0.0.1, port: '1', labels: {llm-d.ai/role: 0x%s}}" % ("f" * 5000),
        "null",
    ],
)
def test_a_bad_entry_is_left_out(entry: str) -> None:
    found = read(f"endpoints:\n  - {entry}\n  - {{name: b, address: 10.0.0.2, port: '1'}}\n")
    assert [each.name for each in found.endpoints] == ["b"]


@pytest.mark.parametrize("text", ["endpoints: 3", "[1", "- a", "\x00", "", "objectives: []"])
def test_another_text_is_an_error(text: str) -> None:
    with pytest.raises(SourceError):
        read(text)


def test_the_older_prefix_of_labels_is_read_and_said_to_be_old() -> None:
    entry = "{name: a, address: 10.0.0.1, port: '1', labels: {%skv-events-port: '5557'}}"
    older, said = parse_endpoints(f"endpoints: [{entry % 'moonpool.ai/'}]".encode())
    newer, nothing = parse_endpoints(f"endpoints: [{entry % 'moonpool.dev/'}]".encode())
    assert older == newer and older.endpoints[0].events_port == 5557
    assert nothing == [] and len(said) == 1 and "moonpool.dev/" in said[0]


def test_an_objective_that_is_wrong_leaves_out_no_other() -> None:
    text = "endpoints: []\nobjectives: [3, {name: a, priority: x}, {name: b, priority: -1}]"
    found, problems = parse_endpoints(text.encode())
    assert found.objectives == {"b": -1} and len(problems) == 2


def test_no_endpoint_is_a_listing_too() -> None:
    assert read("endpoints:\n").endpoints == ()


async def follow_changes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_file, "LOOK_S", 0.02)
    seen: asyncio.Queue[list[str]] = asyncio.Queue()
    follows = asyncio.create_task(
        EndpointsFile(str(path)).follow(
            lambda listing: seen.put_nowait([each.name for each in listing.endpoints])
        )
    )

    def entry(name: str) -> str:
        return f"  - {{name: {name}, address: 10.0.0.1, port: '1'}}\n"

    async with asyncio.timeout(60):
        assert await seen.get() == ["a"]
        path.write_text("endpoints:\n" + entry("a") + entry("b"))
        assert await seen.get() == ["a", "b"]
        path.write_text("endpoints: [")  # with half a file, the known endpoints stay
        await asyncio.sleep(0.2)
        path.unlink()
        await asyncio.sleep(0.2)
        assert seen.empty()
        other = path.with_suffix(".new")
        other.write_text("endpoints:\n" + entry("c"))
        other.rename(path)
        assert await seen.get() == ["c"]
        target = path.with_suffix(".target")  # replaces the file like a ConfigMap
        target.write_text("endpoints:\n" + entry("d"))
        path.unlink()
        path.symlink_to(target)
        assert await seen.get() == ["d"]
    follows.cancel()


def test_changes_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints:\n  - {name: a, address: 10.0.0.1, port: '1'}\n")
    asyncio.run(follow_changes(path, monkeypatch))


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    source = EndpointsFile(str(tmp_path / "none.yaml"))
    with pytest.raises(SourceError, match="No such file"):
        asyncio.run(source.follow(lambda listing: None))
