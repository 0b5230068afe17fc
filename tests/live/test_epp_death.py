"""Kills pickers behind a real Envoy with `kill -9` while answers stream."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("grpc")
pytest.importorskip("envoy.service.ext_proc")

from tests.live.envoy import PickerProcess, endpoints_text, envoy, picker_process
from tests.live.small_folder import write_model_folder
from tests.live.test_epp import ASKED, CALM, OPEN, PROMPT, open_cluster
from tests.live.vllm_stub import VllmStub, stubs, tokens_after
from tests.live.waiting import wait_until

NUM_STREAMS = 6
NUM_TOKENS = 60
GAP_S = 0.1
UNANSWERED_S = 0.5
"""A picker is stopped for this long before its death, so that Envoy awaits its answers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model_folder(tmp_path_factory.mktemp("models") / "small")


class Streams:
    """Answers under way. `texts` has what has arrived of each."""

    def __init__(self, url: str) -> None:
        self.texts = [""] * NUM_STREAMS
        self._ends = [""] * NUM_STREAMS
        self._url = url
        self._threads = [
            threading.Thread(target=self._follow, args=(number,)) for number in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: all(len(text) > 5 for text in self.texts))

    def _follow(self, number: int) -> None:
        body = ASKED | {"prompt": self._prompt(number), "stream": True, "max_tokens": NUM_TOKENS}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data.startswith("{"):
                    self.texts[number] += json.loads(data)["choices"][0]["text"]
                self._ends[number] = data or self._ends[number]

    @staticmethod
    def _prompt(number: int) -> list[int]:
        return [*PROMPT, number]

    def assert_whole(self) -> None:
        """Waits for the ends of the answers."""
        for thread in self._threads:
            thread.join()
        for number, text in enumerate(self.texts):
            assert text == "".join(map(chr, tokens_after(self._prompt(number), NUM_TOKENS)))
        assert self._ends == ["[DONE]"] * NUM_STREAMS


@contextmanager
def served(folder: Path, model: str) -> Iterator[tuple[list[VllmStub], tuple[str, ...]]]:
    """Yields two servers, and the words of a picker for them."""
    with stubs(VllmStub(root=model), VllmStub(root=model)) as found:
        file = folder / "endpoints.yaml"
        file.write_text(endpoints_text(*(stub.port for stub in found)))
        yield list(found), ("--endpoints", str(file), *CALM)


def kill(picker: PickerProcess) -> None:
    picker.process.send_signal(signal.SIGSTOP)
    time.sleep(UNANSWERED_S)
    picker.stop(signal.SIGKILL)


def status_of(url: str) -> int:
    return httpx.post(f"{url}/v1/completions", json=ASKED, timeout=60).status_code


@pytest.mark.long
@pytest.mark.parametrize("fails_open", [False, True])
def test_answers_outlive_their_picker(tmp_path: Path, model: str, fails_open: bool) -> None:
    with ExitStack() as stack:
        found, words = stack.enter_context(served(tmp_path, model))
        picker = stack.enter_context(picker_process(tmp_path, *words))
        replaces = (*OPEN, open_cluster(found[1].port)) if fails_open else ()
        url = stack.enter_context(envoy(tmp_path, picker.grpc_port, replaces))
        picker.await_instances("e0", "e1")
        for stub in found:
            stub.gap_s = GAP_S
        streams = Streams(url)
        kill(picker)
        # A call without a picker goes to the endpoint that Envoy chooses, or is refused.
        statuses = [status_of(url) for _ in range(4)]
        assert statuses == [200 if fails_open else 503] * 4
        streams.assert_whole()
        again = stack.enter_context(picker_process(tmp_path, *words, grpc_port=picker.grpc_port))
        again.await_instances("e0", "e1")
        wait_until(lambda: status_of(url) == 200 and decides(url, again))


def decides(url: str, picker: PickerProcess) -> bool:
    """Whether Envoy asks this picker."""
    name = f"asked-{time.monotonic_ns()}"
    headers = {"x-request-id": name}
    answer = httpx.post(f"{url}/v1/completions", json=ASKED, headers=headers, timeout=60)
    told = httpx.get(f"{picker.url}/explain/{name}").json()
    return answer.status_code == 200 and "decode_instance" in told


def test_of_two_pickers_one_may_die(tmp_path: Path, model: str) -> None:
    with ExitStack() as stack:
        found, words = stack.enter_context(served(tmp_path, model))
        one, other = (stack.enter_context(picker_process(tmp_path, *words)) for _ in range(2))
        address = "                    socket_address: { address: 127.0.0.1, port_value: %d }\n"
        line = address % one.grpc_port
        more = f"              - endpoint:\n                  address:\n{address % other.grpc_port}"
        url = stack.enter_context(envoy(tmp_path, one.grpc_port, ((line, line + more),)))
        for picker in (one, other):
            picker.await_instances("e0", "e1")
        wait_until(lambda: decides(url, one))
        wait_until(lambda: decides(url, other))
        for stub in found:
            stub.gap_s = GAP_S
        streams = Streams(url)
        assert one.requests() and other.requests()
        kill(one)
        assert [status_of(url) for _ in range(12)] == [200] * 12
        streams.assert_whole()
        wait_until(lambda: other.requests() == 0)
        again = stack.enter_context(picker_process(tmp_path, *words, grpc_port=one.grpc_port))
        again.await_instances("e0", "e1")
        wait_until(lambda: decides(url, again))
