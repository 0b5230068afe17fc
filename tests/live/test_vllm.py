"""`serve --vllm` uses running engines as instances. The engines are moonpool servers, which speak
the part of vLLM's HTTP that is needed. With MOONPOOL_VLLM_PYTHON, the Python of a vLLM
installation, and MOONPOOL_VLLM_MODEL, a folder that it can serve, `make long` also uses real vLLMs;
with MOONPOOL_VLLM_MEDIA_MODEL, a folder of a model that takes images, also a vLLM of that model.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.live.vllm_server import VllmServer
from moonpool_lab.demo.local_server import ServerError, free_port
from moonpool_lab.replay.server import parse_metrics
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import SMALL
from tests.live.test_host_pool import Pool
from tests.live.test_vllm_pool import module_paths
from tests.live.vllm_pool.run import CONNECTOR as MOONPOOL
from tests.live.waiting import wait_until

PROMPT = [(7 * i) % 250 for i in range(200)]
ASKED = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
MODEL = "moonpool/induction"  # a model whose answers can end and keep a form
# A busy machine measures slow steps, which must not refuse a request here.
ENGINE = [MODEL, "--mixed", "1", *SMALL, "--admission", "none", "--slo-ttft", "600"]


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LocalServer]]:
    with LocalServer(ENGINE) as one, LocalServer(ENGINE) as other:
        yield [one, other]


@pytest.fixture(scope="module")
def front(engines: list[LocalServer]) -> Iterator[LocalServer]:
    with LocalServer([word for e in engines for word in ("--vllm", e.url)]) as server:
        yield server


def complete(url: str, **others: Any) -> dict[str, Any]:
    body = ASKED | {"return_token_ids": True} | others
    answer = fresh.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@pytest.mark.long
def test_answers_are_the_engines(engines: list[LocalServer], front: LocalServer) -> None:
    for others in (
        {},
        {"temperature": 1, "seed": 3, "top_p": 0.9, "top_k": 40},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"logit_bias": {"5": 20}, "min_tokens": 3},
        {"ignore_eos": False, "structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}},
        {"ignore_eos": False, "structured_outputs": {"choice": ["yes", "no"]}},
        {"max_tokens": 1},
    ):
        assert tokens(complete(front.url, **others)) == tokens(
            complete(engines[0].url, **others)
        ), others


@pytest.mark.long
def test_a_prompt_goes_where_it_has_been_computed(front: LocalServer) -> None:
    """A pause of the machine can make one engine look slower than a second computation of a prompt,
    so a round may fail. If placement were random, one in 256 rounds would succeed."""
    for first in range(0, 80, 16):
        factors = range(first + 1, first + 17, 2)  # odd factors, so that no two prompts begin alike
        prompts = [[(i * n + 3 + first) % 250 for i in range(200)] for n in factors]
        for prompt in prompts:
            complete(front.url, prompt=prompt)
        if all(num_cached(front, prompt) >= 176 for prompt in prompts):
            return
    raise AssertionError("no round had a hit for each prompt")


def num_cached(front: LocalServer, prompt: list[int]) -> int:
    usage = complete(front.url, prompt=prompt)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_tenants_find_nothing_of_each_others(front: LocalServer) -> None:
    prompt = [(i * 23 + 1) % 250 for i in range(200)]
    for salt in ("a", "b"):
        answer = complete(front.url, prompt=prompt, cache_salt=salt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert tokens(complete(front.url, prompt=prompt, cache_salt="b")) == tokens(answer)


def test_many_at_once_stream_to_their_ends(engines: list[LocalServer], front: LocalServer) -> None:
    prompts = [[(i * n + 5) % 250 for i in range(40 + n)] for n in range(3, 15)]
    expected = [tokens(complete(engines[0].url, prompt=p)) for p in prompts]
    found: dict[int, list[int]] = {}

    def stream(number: int) -> None:
        found[number] = streamed(front.url, prompt=prompts[number])

    threads = [threading.Thread(target=stream, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(len(prompts))] == expected
    instances = fresh.get(f"{front.url}/cluster").json()["instances"]
    assert all(each["booked_decodes"] == 0 for each in instances)


def streamed(url: str, **others: Any) -> list[int]:
    body = ASKED | {"stream": True, "return_token_ids": True} | others
    found: list[int] = []
    with fresh.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                found += event["choices"][0].get("token_ids") or [] if event["choices"] else []
    return found


def test_who_goes_away_ends_it_at_the_engine_too(
    engines: list[LocalServer], front: LocalServer
) -> None:
    wait_until(lambda: not any(map(busy, engines)))  # until the front has measured the engines
    body, before = ASKED | {"stream": True, "max_tokens": 7000}, sum(map(aborted, engines))
    with fresh.stream("POST", f"{front.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # This client leaves, which must end its request.
        next(lines)
        assert any(map(busy, engines))
    wait_until(lambda: not any(map(busy, engines)))
    assert sum(map(aborted, engines)) > before


def aborted(server: LocalServer) -> float:
    metrics = parse_metrics(fresh.get(f"{server.url}/metrics").text)
    return metrics.get("moonpool:requests_failed_total{abort}", 0.0)


def busy(server: LocalServer) -> int:
    found: int = fresh.get(f"{server.url}/cluster").json()["requests_under_way"]
    return found


def test_what_is_no_vllm_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[engine]\nkind = "vllm"\n')
    with (
        pytest.raises(ServerError, match="no server listens there"),
        LocalServer(["--vllm", f"http://127.0.0.1:{free_port()}"]),
    ):
        pass
    with pytest.raises(ServerError, match="names no server"), LocalServer(["--vllm", "localhost"]):
        pass
    with pytest.raises(ServerError, match="--vllm URL"), LocalServer(["--config", str(config)]):
        pass


@pytest.mark.long
def test_another_model_is_turned_away(engines: list[LocalServer]) -> None:
    with (
        pytest.raises(ServerError, match="start both with the same model"),
        LocalServer(["random:m30", "--vllm", engines[0].url]),
    ):
        pass


@pytest.mark.long
def test_an_engine_that_is_killed_costs_no_answer_and_comes_back(
    engines: list[LocalServer], front: LocalServer
) -> None:
    """This test comes last, because it kills one of the engines that the tests share."""
    prompts = [[(i * n + 9) % 250 for i in range(60)] for n in range(7, 11)]
    long = {"max_tokens": 1500}
    expected = [tokens(complete(engines[0].url, prompt=p, **long)) for p in prompts]
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = streamed(front.url, prompt=prompts[number], **long)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    wait_until(lambda: any(map(busy, engines)))
    goes = next(engine for engine in engines if busy(engine))
    for pid in (goes.pid, *goes.worker_pids()):
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(len(prompts))] == expected
    wait_until(lambda: len(front.instances()) == 1)
    with LocalServer(ENGINE, port=goes.port):
        wait_until(lambda: len(front.instances()) == 2)
        assert tokens(complete(front.url, prompt=prompts[0], **long)) == expected[0]


EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


@contextmanager
def real_ones(
    connector: dict[str, Any] | None = None, more: dict[str, str] | None = None
) -> Iterator[list[str]]:
    """Starts two vLLMs with a core each, and returns the flags that name them. `more` has variables
    of their environment."""
    python, model = (os.environ.get(f"MOONPOOL_VLLM_{name}") for name in ("PYTHON", "MODEL"))
    if not python or not model:
        pytest.skip("needs a vLLM: MOONPOOL_VLLM_PYTHON and MOONPOOL_VLLM_MODEL")
    with ExitStack() as stack:
        places = []
        for core in range(2):
            events, replay, side = (free_port() for _ in range(3))
            told = EVENTS | {
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            }
            flags = ["--enforce-eager", "--kv-events-config", json.dumps(told)]
            if connector is not None:
                flags += ["--kv-transfer-config", json.dumps(connector)]
            side_channel = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
                **(more or {}),
            }
            options = {"--block-size": 32, "--max-model-len": 1024}
            server = VllmServer(python, model, str(core), options, flags, side_channel)
            stack.enter_context(server)
            where = f"tcp://127.0.0.1:{events},tcp://127.0.0.1:{replay}"
            places.append(f"{server.url},{where}")
        yield places


@pytest.mark.long
@pytest.mark.timeout(900)
def test_real_vllms_answer_and_say_what_they_cache() -> None:
    with real_ones() as places:
        words = [word for place in places for word in ("--vllm", place)]
        with LocalServer(words) as front:
            url = places[0].split(",")[0]
            for others in ({}, {"temperature": 1, "seed": 3}, {"prompt": PROMPT[:70]}):
                model = fresh.get(f"{url}/v1/models").json()["data"][0]["id"]
                expected = tokens(complete(url, model=model, **others))
                assert tokens(complete(front.url, **others)) == expected
            wait_until(lambda: sum(i["pool"].get("cached", 0) for i in front.instances()) >= 6)
            answer = complete(front.url)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


JOIN_S = 10.0
NUM_ASKING = 6


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_real_vllm_that_joins_is_used_within_10_s(tmp_path: Path) -> None:
    """Prints the seconds from the first healthy answer of a new vLLM to the first request placed on
    it, and to its measured times. It is listed before it runs, or once it is healthy."""
    path = tmp_path / "endpoints.yaml"
    words = ["--vllm-endpoints", str(path), "--admission", "none", "--slo-ttft", "600"]
    with real_one("MOONPOOL_VLLM_MODEL") as first:
        _list(path, first)
        with LocalServer(words) as front:
            for is_listed_first in (True, False):
                new = real_one("MOONPOOL_VLLM_MODEL", core="1")
                if is_listed_first:
                    _list(path, first, new)
                with new:
                    used_s, measured_s = _join(path, front, first, new)
                    when = "before" if is_listed_first else "after"
                    print(f"listed {when} health: used {used_s:.1f} s, measured {measured_s:.1f} s")
                    assert used_s < JOIN_S
                    _list(path, first)
                    wait_until(lambda: len(front.instances()) == 1)


def _join(
    path: Path, front: LocalServer, first: VllmServer, new: VllmServer
) -> tuple[float, float]:
    """Lists `new`, which has just become healthy. Returns the seconds until the Conductor places a
    request on it, while requests run, and until its times are measured, when they have ended."""
    healthy_s = time.monotonic()
    _list(path, first, new)
    with _asking(front.url):
        wait_until(lambda: _has_work(front, new))
        used_s = time.monotonic() - healthy_s
    wait_until(lambda: _is_measured(front, new))
    return used_s, time.monotonic() - healthy_s


@contextmanager
def _asking(url: str) -> Iterator[None]:
    """Keeps some requests under way during the `with` block."""
    stop = threading.Event()

    def ask(number: int) -> None:
        drawn = random.Random(number)
        while not stop.is_set():
            complete(url, prompt=drawn.choices(range(3, 250), k=200))

    with ThreadPoolExecutor(NUM_ASKING) as threads:
        asked = [threads.submit(ask, number) for number in range(NUM_ASKING)]
        try:
            yield
        finally:
            stop.set()
    for future in asked:
        future.result()


def _is_measured(front: LocalServer, server: VllmServer) -> bool:
    return any(f"measured {server.url}:" in line for line in front.log_lines())


def _list(path: Path, *servers: VllmServer) -> None:
    entries = [
        {"name": f"vllm-{each.port}", "address": "127.0.0.1", "port": str(each.port)}
        for each in servers
    ]
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"endpoints": entries}))
    new.replace(path)


def _has_work(front: LocalServer, server: VllmServer) -> bool:
    """Whether the Conductor has placed a request on the server."""
    found = next((i for i in front.instances() if i["instance_id"] == f"vllm-{server.port}"), None)
    return found is not None and found["booked_decodes"] + found["queued_prefills"] > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_real_vllms_hand_their_kvcache_over() -> None:
    python = os.environ.get("MOONPOOL_VLLM_PYTHON")
    if python and subprocess.run([python, "-c", "import nixl"], check=False).returncode:
        pytest.skip("vLLM's Python has no nixl")
    with real_ones(NIXL) as places:
        words = ["--vllm-prefill", places[0], "--vllm-decode", places[1]]
        with LocalServer(words) as front:
            url = places[0].split(",")[0]
            model = fresh.get(f"{url}/v1/models").json()["data"][0]["id"]
            expected = tokens(complete(url, model=model))
            assert tokens(complete(front.url)) == expected
            fetched = fresh.get(f"{places[1].split(',')[0]}/metrics").text
            (moved,) = re.findall(r"nixl_bytes_transferred_sum\{.*\} (\S+)", fetched)
            assert float(moved) > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_real_vllms_hand_their_kvcache_over_by_the_pool(tmp_path: Path) -> None:
    pool = Pool("--dram", "256MiB")
    connector = MOONPOOL | {"kv_connector_extra_config": {"pool": str(pool.socket)}}
    with ExitStack() as stack:
        stack.callback(pool.close)
        places = stack.enter_context(real_ones(connector, {"PYTHONPATH": module_paths(tmp_path)}))
        urls = [place.split(",")[0] for place in places]
        words = ["--vllm-prefill", urls[0], "--vllm-decode", urls[1]]
        here = dict(os.environ) | {"MOONPOOL_POOL": str(pool.socket)}
        front = stack.enter_context(LocalServer(words, environment=here))
        model = fresh.get(f"{urls[0]}/v1/models").json()["data"][0]["id"]
        assert tokens(complete(front.url)) == tokens(complete(urls[0], model=model))
        told = fresh.get(f"{urls[1]}/metrics").text
        found = re.findall(r"external_prefix_cache_hits_total\{.*\} (\S+)", told)
        # All complete blocks of 32 of the 200 tokens came from the pool.
        assert sum(map(float, found)) == 192


def real_one(kind: str, *flags: str, core: str = "0") -> VllmServer:
    """Returns a vLLM of the model that a variable names, which starts with a `with` block."""
    python, model = os.environ.get("MOONPOOL_VLLM_PYTHON"), os.environ.get(kind)
    if not python or not model:
        pytest.skip(f"needs a vLLM: MOONPOOL_VLLM_PYTHON and {kind}")
    words = ["--enforce-eager", "--served-model-name", "own", *flags]
    options = {"--block-size": 32, "--max-model-len": 1024}
    return VllmServer(python, model, core, options, words)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_real_vllm_pools_and_the_answer_is_its_own() -> None:
    with (
        real_one("MOONPOOL_VLLM_MODEL", "--runner", "pooling") as server,
        LocalServer(["--vllm", server.url]) as front,
    ):
        for path, body in (
            ("/v1/embeddings", {"input": ["a text", "another one"]}),
            ("/v1/embeddings", {"input": [5, 6, 7], "encoding_format": "base64"}),
            ("/pooling", {"input": "a text"}),
            ("/v1/score", {"text_1": "a b", "text_2": ["a b", "c d"]}),
            ("/v1/rerank", {"query": "a b", "documents": ["c d", "a b"]}),
        ):
            own, ours = (
                fresh.post(f"{url}{path}", json={"model": "own", **body}, timeout=120).json()
                for url in (server.url, front.url)
            )
            assert own.get("data") or own["results"]
            assert [ours.get(name) for name in ("data", "results", "model")] == [
                own.get(name) for name in ("data", "results", "model")
            ]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_real_vllm_sees_images_and_the_answer_is_its_own() -> None:
    with (
        real_one("MOONPOOL_VLLM_MEDIA_MODEL", "--load-format", "dummy") as server,
        LocalServer(["--vllm", server.url]) as front,
    ):
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        content = [{"type": "text", "text": "What is it?"}, image]
        body = {
            "model": "own",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 5,
            "temperature": 0,
        }
        own, ours = (
            fresh.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
            for url in (server.url, front.url)
        )
        assert own["choices"] == ours["choices"]
        assert own["usage"]["prompt_tokens"] == ours["usage"]["prompt_tokens"]


PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9aw"
    "AAAABJRU5ErkJggg=="
)
