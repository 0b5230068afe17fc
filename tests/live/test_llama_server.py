"""Runs `serve --vllm URL,SLOTS` in front of a real llama-server, which `PATH` or
MOONPOOL_LLAMA_SERVER names: checks its answers, and that its slots are saved and then restored
after its death."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool_lab.demo.local_server import free_port
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.waiting import WAIT_S, wait_until
from tests.unit.engine.gguf_files import tiny_llama

BINARY = os.environ.get("MOONPOOL_LLAMA_SERVER") or shutil.which("llama-server") or ""
pytestmark = pytest.mark.skipif(not BINARY, reason="there is no llama-server")

EASY = ["--admission", "none", "--slo-ttft", "600"]
NO_TEXT = (*range(32), *range(127, 256), 258, 259)
"""Returns tokens that are not complete characters: the stream of a llama-server leaves them out."""
OPENED, GONE = "are saved in", "is gone; the instance leaves"
TALKS = [f"{what} is what this long conversation is for. " * 10 for what in ("A", "B!", "C?!")]


class LlamaProcess:
    """Runs a llama-server at an address that stays the same over restarts."""

    def __init__(self, model: Path, *words: str, slots: Path | None = None, count: int = 2) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        saving = ["--slot-save-path", f"{slots}/"] if slots is not None else []
        self._line = [BINARY, "-m", model.name, "--port", str(self.port), "-t", "1"]
        self._line += ["-c", str(4096 * count), "-np", str(count), "--cache-ram", "0", "--metrics"]
        self._line[2] = str(model)
        self._line += [*saving, *words]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path | None = None) -> LlamaProcess:
        self.process = subprocess.Popen(
            self._line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
        )
        wait_until(lambda: ok(f"{self.url}/health"))
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def restart(self, front: LocalServer) -> None:
        """Kills the server, waits until the head misses it, and starts it again."""
        gone, opened = (log(front).count(text) for text in (GONE, OPENED))
        self.kill()
        wait_until(lambda: log(front).count(GONE) > gone)
        self.start()
        wait_until(lambda: log(front).count(OPENED) > opened)

    def restart_unseen(self, front: LocalServer) -> bool:
        """Does the same without the wait. Returns whether the head missed nothing: the head looks
        every two seconds, so on a busy machine it may miss the kill."""
        gone, opened = (log(front).count(text) for text in (GONE, OPENED))
        self.kill()
        self.start()
        if log(front).count(GONE) == gone:
            return True
        wait_until(lambda: log(front).count(OPENED) > opened)
        return False

    def answer(self, text: str, **more: Any) -> str:
        """Returns the server's answer to a request that does not use its cache."""
        body = {"prompt": text, "n_predict": 16, "temperature": 0.0, "cache_prompt": False} | more
        body["logit_bias"] = [[number, -100.0] for number in NO_TEXT]
        answer = fresh.post(f"{self.url}/completion", json=body, timeout=WAIT_S).json()
        found: str = answer["content"]
        return found


def ok(url: str) -> bool:
    try:
        return fresh.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def complete(front: LocalServer, text: str, **more: Any) -> httpx.Response:
    body = {"prompt": text, "max_tokens": 16, "temperature": 0} | more
    body["logit_bias"] = {str(number): -100 for number in NO_TEXT}
    return fresh.post(f"{front.url}/v1/completions", json=body, timeout=WAIT_S)


def said(front: LocalServer, text: str, **more: Any) -> str:
    found = complete(front, text, **more)
    assert found.status_code == 200, found.text
    answer: str = found.json()["choices"][0]["text"]
    return answer


def log(front: LocalServer) -> str:
    return "\n".join(front.log_lines())


def computed(server: LlamaProcess) -> float:
    """Returns how many prompt tokens the server has computed, without the tokens found in a
    slot."""
    text = fresh.get(f"{server.url}/metrics", timeout=WAIT_S).text
    lines = (line for line in text.splitlines() if line.startswith("llamacpp:prompt_tokens_total"))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("moonpool-*.slot"))


def num_saved(folder: Path, text: str) -> int:
    """Returns how many slots are saved, as complete files, whose text this is, among the slots of
    which they keep complete blocks."""
    data = text.encode()  # The model has a token for each letter, and one for "ab".
    assert b"ab" not in data
    tokens, found = array("I", list(data[: len(data) // 64 * 64])).tobytes(), 0
    for note in folder.glob("moonpool-*.note"):
        with contextlib.suppress(FileNotFoundError):  # fails if a longer prompt has taken the slot
            found += tokens in note.read_bytes()
    return found


def saved(folder: Path, *texts: str) -> None:
    """Waits until slots with these texts are saved."""
    wait_until(lambda: all(num_saved(folder, text) for text in texts))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft = tiny_llama({"": "F32"})
    draft.metadata |= {"llama.context_length": 4096, "tokenizer.ggml.add_bos_token": False}
    return draft.write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def twin(model: Path) -> Iterator[LlamaProcess]:
    """Runs another server of the model, without moonpool in front of it."""
    server = LlamaProcess(model, count=1).start()
    yield server
    server.kill()


Stage = tuple[LlamaProcess, LocalServer, Path]


@pytest.fixture(scope="module")
def stage(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("slots")
    server = LlamaProcess(model, slots=folder).start()
    try:
        with LocalServer(["--vllm", f"{server.url},{folder}", *EASY]) as front:
            wait_until(lambda: OPENED in log(front))
            yield server, front, folder
    finally:
        server.kill()


def test_answers_are_the_servers(stage: Stage, twin: LlamaProcess) -> None:
    _, front, _ = stage
    for text in ("ab", "What is that?", "Größe – ähnlich", TALKS[0]):
        assert said(front, text) == twin.answer(text)
    for text in ("x", "yy"):
        drawn = said(front, text, temperature=1, seed=5)
        assert drawn == said(front, text, temperature=1, seed=5)
    bias = {str(number): -100 for number in NO_TEXT}
    chat = {
        "logit_bias": bias,
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = fresh.post(f"{front.url}/v1/chat/completions", json=chat, timeout=WAIT_S).json()
    assert answer["choices"][0]["message"]["content"] == twin.answer("abc<end>", n_predict=8)
    assert answer["usage"]["prompt_tokens"] == 2


def test_what_it_cannot_do_is_refused(stage: Stage) -> None:
    _, front, _ = stage
    for field in ({"bad_words": ["no"]}, {"allowed_token_ids": [97]}, {"prompt_logprobs": 1}):
        found = complete(front, "abc", **field)
        assert found.status_code == 400 and "llama-server" in found.text, found.text
    assert said(front, "abc")


def test_stop_tokens_end_an_answer(stage: Stage, twin: LlamaProcess) -> None:
    _, front, _ = stage
    text = twin.answer("abc")
    stop = text.encode()[0]
    found = complete(front, "abc", stop_token_ids=[stop]).json()["choices"][0]
    assert found["finish_reason"] == "stop"


def test_conversations_come_back_after_the_death_of_the_server(
    stage: Stage, twin: LlamaProcess
) -> None:
    server, front, folder = stage
    expected = [twin.answer(text) for text in TALKS]
    answers = [said(front, text) for text in TALKS]  # the talks use two slots
    assert answers == expected
    saved(folder, *TALKS)
    server.restart(front)
    for text, answer in zip(TALKS, answers, strict=True):
        again = f"{text}{answer} And?"
        before = computed(server)
        found = said(front, again)
        assert computed(server) - before < 0.3 * len(text)
        assert found == twin.answer(again)


def test_damaged_files_are_misses(stage: Stage, twin: LlamaProcess) -> None:
    server, front, folder = stage
    said(front, TALKS[0] + "more")
    saved(folder, TALKS[0] + "more")
    for number, path in enumerate(files(folder)):
        data = bytearray(path.read_bytes())
        if number % 2:
            data[len(data) // 2] ^= 16
        else:
            del data[len(data) // 3 :]
        path.write_bytes(data)
    spoilt = files(folder)
    server.restart(front)
    for text in TALKS:
        assert said(front, text + "more") == twin.answer(text + "more")
    assert "a slot was not restored: its file is damaged or gone" in log(front)
    assert not all(path.exists() for path in spoilt)


def test_tenants_have_slots_of_their_own(stage: Stage, twin: LlamaProcess) -> None:
    server, front, folder = stage
    text = "The same words from two houses. " * 12
    expected = twin.answer(text)
    counts = []
    for tenants in (("one", "other"), ("one", "other")):
        for tenant in tenants:
            before = computed(server)
            assert said(front, text, cache_salt=tenant) == expected
            counts.append(computed(server) - before)
        # until each slot has one file and no save is under way
        wait_until(lambda: num_saved(folder, text) == 2)
    assert min(counts[:2]) >= len(text) > 10 * max(counts[2:])


def test_another_model_uses_none_of_the_files(stage: Stage, tmp_path: Path) -> None:
    _, front, folder = stage
    said(front, TALKS[1])
    saved(folder, TALKS[1])
    other = tiny_llama({"": "F32"}, inter=128)
    other.metadata |= {"llama.context_length": 4096, "tokenizer.ggml.add_bos_token": False}
    model = other.write(tmp_path / "tiny.gguf")
    server = LlamaProcess(model, slots=folder).start()
    try:
        with LocalServer(["--vllm", f"{server.url},{folder}", *EASY]) as second:
            wait_until(lambda: OPENED in log(second))
            assert "0 of earlier are there" in log(second)
            assert said(second, TALKS[1]) == server.answer(TALKS[1])
    finally:
        server.kill()


def test_another_folder_is_found_out_and_a_model_by_a_relative_name_gets_text(
    model: Path, tmp_path: Path
) -> None:
    server = LlamaProcess(Path(model.name), slots=tmp_path / "theirs")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    server.start(model.parent)
    try:
        with LocalServer(["--vllm", f"{server.url},{tmp_path / 'ours'}", *EASY]) as front:
            wait_until(lambda: "no slots of" in log(front))
            assert "saves slots in another folder" in log(front)
            assert said(front, "abc") == server.answer("abc")
            body = {
                "messages": [{"role": "user", "content": "abc"}],
                "max_tokens": 8,
                "stream": True,
                "logit_bias": {str(number): -100 for number in NO_TEXT},
            }
            lines = fresh.post(f"{front.url}/v1/chat/completions", json=body, timeout=WAIT_S).text
            assert lines.rstrip().endswith("[DONE]") and "chat.completion.chunk" in lines
            refused = fresh.post(f"{front.url}/tokenize", json={"prompt": "a"}, timeout=WAIT_S)
            assert refused.status_code == 404 and "tokenizer" in refused.text
    finally:
        server.kill()


def test_a_restart_that_nobody_saw_is_found_out(stage: Stage) -> None:
    server, front, folder = stage
    texts = [f"{number} times the restart was not seen. " * 12 for number in range(2)]
    for _ in range(5):
        answers = [said(front, text) for text in texts]
        saved(folder, *texts)
        if server.restart_unseen(front):
            break
    else:
        pytest.skip("the head has seen each restart: this machine is too busy")
    assert said(front, texts[0]) == answers[0]
    wait_until(lambda: "found 0 of" in log(front))
    before = computed(server)
    assert said(front, texts[1]) == answers[1]
    assert computed(server) - before < 0.3 * len(texts[1])
