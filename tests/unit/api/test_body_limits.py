"""Tests the limits of a model's chat template and tokenizer: a call beyond them gets one clear
error, other calls are served meanwhile, and the server continues."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_head import ScriptedHead

from moonpool.api import body_pool
from moonpool.api.body_pool import BodyReader, body_start
from moonpool.api.body_process import Kind
from moonpool.api.body_reading.client import BodyClient
from moonpool.api.errors import ApiError
from moonpool.api.helpers import process as helper_process
from moonpool.api.serving_backend import ApiOptions
from tests.processes import children
from tests.unit.engine.test_tokenizer_huggingface import byte_level, write_folder

ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
IN_C = (
    "{% set s = 'ab' * 10**6 %}{% for a in range(9000) %}{{ s.replace('a', 'bb')[0] }}{% endfor %}"
)
STUCK_IN_C = "{{ ('9' * 10**7)|int }}"
MEMORY = "{{ 'a' * 10**10 }}"
GROWING = (
    "{% set n = namespace(s='ab') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
)
LIMIT_S = 0.3


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_pool, "body_s", lambda num_bytes: LIMIT_S)


def template(bad: str) -> ApiOptions:
    """Returns a template that reaches its bad part for the message "bad", and renders any other
    message."""
    source = f"{{% if messages[0].content == 'bad' %}}{bad}{{% endif %}}ok"
    return ApiOptions(tokenizer="bytes", chat_template=source)


@contextmanager
def reading(options: ApiOptions) -> Iterator[BodyReader]:
    reader = BodyReader(ScriptedHead(), options)
    try:
        yield reader
    finally:
        reader.close()


def run(options: ApiOptions, work: Callable[[BodyReader], Awaitable[Any]]) -> Any:
    async def here() -> Any:
        with reading(options) as reader:
            return await work(reader)

    return asyncio.run(here())


async def ask(reader: BodyReader, text: str, tenant: str = "") -> int:
    """Returns the number of prompt tokens of a chat."""
    body = {"messages": [{"role": "user", "content": text}]}
    call = await reader.call("chat", json.dumps(body).encode(), tenant, 60.0)
    return len(call.prompts[0])


@pytest.mark.parametrize("bad", [ENDLESS, IN_C, MEMORY, GROWING])
def test_a_template_that_takes_too_much_is_one_clear_error(bad: str) -> None:
    async def work(reader: BodyReader) -> None:
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await ask(reader, "bad")
            assert caught.value.status == 400
            assert caught.value.code == "chat_template_error"
            assert "The model's chat template" in caught.value.message
            assert "--chat-template FILE" in caught.value.message
            assert await ask(reader, "good") == 2

    run(template(bad), work)


def test_what_does_not_return_from_c_ends_with_its_process_alone() -> None:
    """Without Python's own limit on digits, the number's text takes minutes in one call."""
    options, others = template(STUCK_IN_C), children()

    async def work(reader: BodyReader) -> None:
        assert await ask(reader, "good") == 2
        before = children() - others
        with pytest.raises(ApiError, match="chat template takes more than"):
            await ask(reader, "bad")
        assert await ask(reader, "good") == 2
        assert before and not before & children()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONINTMAXSTRDIGITS", "0")
        run(options, work)


CALLS: list[tuple[Kind, dict[str, Any], str]] = [
    ("chat", {"messages": [{"role": "user", "content": "bad"}]}, "messages"),
    ("responses", {"input": "bad"}, "input"),
    ("messages", {"messages": [{"role": "user", "content": "bad"}], "max_tokens": 3}, "messages"),
    ("count_tokens", {"messages": [{"role": "user", "content": "bad"}]}, "messages"),
    ("tokenize", {"messages": [{"role": "user", "content": "bad"}]}, "prompt"),
]


def test_every_way_to_a_template_has_its_limits() -> None:
    async def work(reader: BodyReader) -> None:
        for kind, body, param in CALLS:
            use = reader.respond if kind in ("count_tokens", "tokenize") else reader.call
            with pytest.raises(ApiError, match="chat template needs too much memory") as caught:
                await use(kind, json.dumps(body).encode(), "", 60.0)
            assert caught.value.param == param, kind
        large = {"messages": [{"role": "user", "content": "bad"}] + CALLS[0][1]["messages"] * 3000}
        with pytest.raises(ApiError, match="chat template needs too much memory"):
            await reader.call("chat", json.dumps(large).encode(), "", 60.0)

    run(template(MEMORY), work)


@pytest.mark.parametrize("bad", [ENDLESS, IN_C])
def test_a_tenant_whose_calls_take_too_long_leaves_the_others_their_turns(bad: str) -> None:
    async def work(reader: BodyReader) -> None:
        await ask(reader, "good", "b")
        ended: list[str] = []

        async def note(text: str, tenant: str) -> None:
            try:
                await ask(reader, text, tenant)
            except ApiError:
                ended.append("error")
            else:
                ended.append(tenant)

        flood = [asyncio.create_task(note("bad", "a")) for _ in range(20)]
        await asyncio.sleep(0.05)
        for _ in range(5):
            before = ended.count("error")
            await note("good", "b")
            assert ended.count("error") - before <= 2, "it waited for many calls of another tenant"
        assert len(ended) < 20, "the flood had ended before: nothing was seen"
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert await ask(reader, "good", "a") == 2  # the server still answers valid calls

    run(template(bad), work)


def test_each_call_that_takes_too_long_shortens_the_next_and_each_good_one_lengthens_it() -> None:
    patience = body_pool.Patience()
    limits = []
    for was_exhausted in [True] * 5 + [False] * 5:
        limits.append(patience.of("a", 0))
        patience.note("a", was_exhausted)
    assert limits == [LIMIT_S / n for n in (1, 2, 4, 8, 8, 8, 4, 2, 1, 1)]
    assert patience.of("b", 0) == LIMIT_S
    assert len(patience) == 0


def test_calls_that_are_in_a_process_when_it_dies_are_read_by_the_next() -> None:
    others = children()

    async def work(reader: BodyReader) -> None:
        await ask(reader, "good")
        for _ in range(3):
            [pid] = children() - others
            calls = [asyncio.create_task(ask(reader, f"good {n}")) for n in range(30)]
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*calls) == [2] * 30

    run(template(ENDLESS), work)


@pytest.mark.long
def test_a_process_that_is_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "LATE_S", 0.0)
    others = children()

    async def work(reader: BodyReader) -> None:
        await ask(reader, "good")
        [pid] = children() - others
        os.kill(pid, signal.SIGSTOP)
        assert await ask(reader, "good") == 2

    run(template(ENDLESS), work)


# Tokenizers:


def tokenizer(folder: Path, **changes: Any) -> ApiOptions:
    write_folder(folder, byte_level())
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return ApiOptions(tokenizer=str(folder))


def split(pattern: str) -> dict[str, Any]:
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [words | {"invert": False}, {"type": "ByteLevel", "add_prefix_space": False}]
    return {"type": "Sequence", "pretokenizers": [s | {"trim_offsets": True} for s in steps]}


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


TWICE = {"type": "Sequence", "normalizers": [replace("a", "aa")] * 40}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a pattern that tries all ways": ({"pre_tokenizer": split("(a+)+$")}, "a" * 40 + "b"),
    "a text that doubles": ({"normalizer": TWICE}, "a"),
    "a text that grows": ({"normalizer": replace("a", "a" * 10**5)}, "a" * 50_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_costs_its_call_alone(name: str, tmp_path: Path) -> None:
    changes, text = HOSTILE[name]

    async def work(reader: BodyReader) -> None:
        bodies = [json.dumps({"prompt": prompt}).encode() for prompt in (text, "hi")]
        with pytest.raises(ApiError, match="The model's tokenizer") as caught:
            await reader.call("completion", bodies[0], "", 60.0)
        assert (caught.value.status, caught.value.param) == (400, "prompt")
        assert len((await reader.call("completion", bodies[1], "", 60.0)).prompts[0]) == 2

    run(tokenizer(tmp_path, **changes), work)


def loading(options: ApiOptions) -> str:
    async def here() -> str:
        process = BodyClient(body_start(options, 300))
        trouble = await process.begin()
        process.end()
        return trouble

    return asyncio.run(here())


@pytest.mark.long
def test_what_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    """The charsmap claims 8 GB, which the library allocates before it reads further."""
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA//8="}
    assert "(SIGABRT)" in loading(tokenizer(tmp_path, normalizer=charsmap))
    assert "cannot be read" in loading(tokenizer(tmp_path, model={"type": "None"}))
    assert not loading(tokenizer(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{% for m in %}")
    trouble = loading(ApiOptions(tokenizer=str(tmp_path)))
    assert trouble.startswith(f"{tmp_path}: the model's chat template does not compile")
    assert "--chat-template: " in loading(template("{% for %}"))
