"""Tests clients whose connection broke and that come back to the same head, with the request id and
the number of tokens that they have. The head sends the known tokens and computes the rest."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_head import ScriptedHead, Step, call, served, wait_until

from moonpool.api.connection import kept_answers
from moonpool.api.connection.kept_answers import KeptAnswers
from moonpool.api.connection.tls import TlsFiles
from moonpool.api.serving_backend import ApiOptions, Output
from moonpool.types import FinishReason, Request, Token
from tests.certificates import make_certificates

TEXT = "Zwölf Boxkämpfer jagen \N{GRINNING FACE} Viktor. "
CUT_AFTER = 30  # number of tokens that the first connection gets
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "return_token_ids": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "return_token_ids": True,
    },
}


class Keeper:
    """A supervisor that counts the kept logs."""

    def __init__(self) -> None:
        self.num_kept = self.num_bytes = 0
        self.held: set[int] = set()
        self.cut_numbers: list[int] = []

    def keep(self, socket_fd: int, log_fd: int, party: str) -> int | None:
        return self.keep_cut(log_fd, party)

    def keep_cut(self, log_fd: int, party: str) -> int | None:
        self.num_kept += 1
        self.held.add(self.num_kept)
        return self.num_kept

    def cut(self, number: int) -> None:
        self.cut_numbers.append(number)

    def drop(self, number: int) -> None:
        self.held.remove(number)

    def take_memory(self, num_bytes: int, party: str) -> bool:
        self.num_bytes += num_bytes
        return True

    def release_memory(self, num_bytes: int, party: str) -> None:
        self.num_bytes -= num_bytes


def speaker() -> ScriptedHead:
    """A head that sends the text and the drawn seed, in groups of three tokens, and makes a long
    pause in the first attempt of each request."""

    def script(request: Request) -> list[Step]:
        delivered = head.delivered[-1]
        said = (TEXT + str(request.sampling.seed)).encode()
        have = len(delivered or ())
        assert delivered is None or bytes(delivered) == said[:have]
        steps: list[Step] = []
        for begin in range(have, len(said), 3):
            part = said[begin : begin + 3]
            if delivered is None and begin >= CUT_AFTER and request.arrived_s not in finishing:
                return [*steps, 60.0]
            end = FinishReason.LENGTH if begin + 3 >= len(said) else None
            steps.append(Output(tokens=tuple(map(Token, part)), finish_reason=end))
        return steps

    finishing: set[float] = set()
    head = ScriptedHead(script)
    return head


class Client:
    def __init__(self, url: str, **options: Any) -> None:
        self.http = httpx.Client(base_url=url, timeout=120, **options)

    def stream(self, path: str, body: dict[str, Any], most: int = 1 << 30, **headers: str) -> Any:
        """Reads this many events. Returns their tokens and text, and the id and the creation time
        of the response."""
        tokens: list[int] = []
        text, names = "", set()
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        with self.http.stream("POST", path, json=body | {"stream": True}, headers=said) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                names.add((chunk["id"], chunk["created"]))
                for choice in chunk["choices"]:
                    tokens += choice.get("token_ids", [])
                    text += (
                        choice["text"] if "text" in choice else choice["delta"].get("content", "")
                    )
                most -= bool(chunk["choices"][0].get("token_ids"))
                if not most:
                    break
        return tokens, text, names


@contextmanager
def cluster(**options: Any) -> Iterator[tuple[ScriptedHead, Keeper, Client]]:
    head, keeper = speaker(), Keeper()
    with served(head, keeper=keeper, **options) as url:
        yield head, keeper, Client(url)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_events", [1, 5, 10])
def test_a_stream_goes_on_after_the_tokens_that_its_client_has(path: str, num_events: int) -> None:
    body = PATHS[path] | {"temperature": 1}
    with cluster() as (head, keeper, client):
        tokens, text, names = client.stream(path, body, num_events, x_request_id="a")
        assert len(tokens) == 3 * num_events
        assert wait_until(lambda: len(keeper.cut_numbers) == 1)
        again = {"x_request_id": "a", "x_resume_tokens": str(len(tokens))}
        rest, more, others = client.stream(path, body, **again)
        whole = (TEXT + str(head.requests[0].sampling.seed)).encode()
        assert bytes(tokens + rest) == whole
        assert text + more == whole.decode()
        assert names == others
        # No known token may be computed again.
        assert head.delivered == [None, tuple(whole[:CUT_AFTER])]
        assert wait_until(lambda: not keeper.held and not keeper.num_bytes)


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_comes_again_gets_its_whole_answer(stream: bool) -> None:
    path = "/v1/completions"
    body = PATHS[path] | {"temperature": 1}
    with cluster() as (head, keeper, client):
        if stream:
            client.stream(path, body, 5, x_request_id="a")
            assert wait_until(lambda: len(keeper.cut_numbers) == 1)
            tokens, _, _ = client.stream(path, body, x_request_id="a")
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.http.post(path, json=body, headers={"x-request-id": "a"}, timeout=1.0)
            assert wait_until(lambda: len(keeper.cut_numbers) == 1)
            answer = client.http.post(path, json=body, headers={"x-request-id": "a"})
            tokens = answer.json()["choices"][0]["token_ids"]
        whole = (TEXT + str(head.requests[0].sampling.seed)).encode()
        assert bytes(tokens) == whole
        assert head.delivered == [None, tuple(whole[:CUT_AFTER])]


def test_another_call_another_id_and_another_tenant_get_answers_of_their_own() -> None:
    path = "/v1/completions"
    body = PATHS[path] | {"temperature": 1}
    options = ApiOptions(api_keys={"ka": "a", "kb": "b"})
    with cluster(options=options) as (head, keeper, client):
        mine = {"x_request_id": "a", "authorization": "Bearer ka"}
        client.stream(path, body, 3, **mine)
        assert wait_until(lambda: len(keeper.cut_numbers) == 1)
        for other, headers in [
            (body, mine | {"authorization": "Bearer kb"}),
            (body, mine | {"x_request_id": "b"}),
            (body | {"prompt": "y"}, mine),
            (body | {"cache_salt": "s"}, mine),
        ]:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            names["x-resume-tokens"] = "9"
            refused = client.http.post(path, json=other | {"stream": True}, headers=names)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "answer_unknown")
            client.stream(path, other, 1, **headers)
            assert head.delivered[-1] is None
            assert len({request.sampling.seed for request in head.requests}) == len(head.requests)
        rest, _, _ = client.stream(path, body, x_resume_tokens="9", **mine)
        assert bytes(rest) == (TEXT + str(head.requests[0].sampling.seed)).encode()[9:]


def test_a_client_that_has_more_than_is_known_gets_what_follows() -> None:
    path = "/v1/completions"
    body = PATHS[path] | {"temperature": 1}
    with cluster() as (head, keeper, client):
        client.stream(path, body, 4, x_request_id="a")
        assert wait_until(lambda: len(keeper.cut_numbers) == 1)
        rest, _, _ = client.stream(path, body, x_request_id="a", x_resume_tokens="40")
        whole = (TEXT + str(head.requests[0].sampling.seed)).encode()
        assert bytes(rest) == whole[40:]
        assert head.delivered[-1] == tuple(whole[:CUT_AFTER])


def test_a_call_that_still_runs_ends_for_the_one_that_goes_on() -> None:
    path = "/v1/completions"
    body = PATHS[path] | {"temperature": 1}
    with cluster() as (head, _, client):
        headers = {"x-request-id": "a"}
        stream = {"json": body | {"stream": True}, "headers": headers}
        # the server does not know this request
        with client.http.stream("POST", path, **stream) as lost:
            lines = lost.iter_lines()
            next(lines)
            rest, _, _ = client.stream(path, body, x_request_id="a", x_resume_tokens="9")
            whole = (TEXT + str(head.requests[0].sampling.seed)).encode()
            assert bytes(rest) == whole[9:]
            with pytest.raises(httpx.HTTPError):
                list(lines)


def test_what_is_unknown_is_computed_again_or_refused() -> None:
    path = "/v1/completions"
    drawn, seeded = {"temperature": 1}, {"temperature": 1, "seed": 5}

    def ask(body: dict[str, Any], tokens: str) -> httpx.Response:
        head = ScriptedHead(lambda _: [Output(tuple(map(Token, b"abcdef")), FinishReason.LENGTH)])
        whole = PATHS[path] | {"stream": True} | body
        return call(head, path, whole, headers={"x-request-id": "a", "x-resume-tokens": tokens})

    assert '"token_ids":[101]' in ask(seeded, "4").text
    assert '"token_ids":[100]' not in ask(seeded, "4").text
    greedy = ask({"temperature": 0}, "6").text
    assert '"token_ids":[' not in greedy.replace('"token_ids":[]', "")
    assert '"finish_reason":"length"' in greedy
    assert greedy.endswith("data: [DONE]\n\n")
    assert ask(drawn, "0").status_code == 200
    for body, tokens, code, status in [
        (drawn, "4", "answer_unknown", 409),
        (seeded, "7", "answer_differs", 409),
        (seeded, "x", "invalid_header", 400),
        (seeded, "-1", "invalid_header", 400),
        (seeded, "1,2", "invalid_header", 400),
        (seeded | {"stream": False}, "1", "invalid_header", 400),
    ]:
        refused = ask(body, tokens)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    said = [{"role": "user", "content": "x"}]
    for other_path, other in [
        ("/v1/chat/completions", {"messages": said, "tools": [tool], "tool_choice": "required"}),
        ("/v1/messages", {"messages": said, "max_tokens": 9}),
        ("/v1/responses", {"input": "x"}),
    ]:
        headers = {"x-resume-tokens": "1"}
        refused = call(ScriptedHead(), other_path, other | {"stream": True}, headers=headers)
        assert refused.status_code == 400
        assert "Last-Event-ID" in refused.json()["error"]["message"]


def test_an_answer_over_tls_goes_on_too(tmp_path: Path) -> None:
    path = "/v1/completions"
    body = PATHS[path] | {"temperature": 1}
    files = make_certificates(tmp_path, "ours", "head")
    head, keeper = speaker(), Keeper()
    tls = TlsFiles(files.certfile, files.keyfile)
    with served(head, keeper=keeper, tls=tls) as url:
        context = ssl.create_default_context(cafile=files.ca_certs)
        context.check_hostname = False
        client = Client(url, verify=context)
        tokens, _, _ = client.stream(path, body, 5, x_request_id="a")
        assert wait_until(lambda: len(keeper.cut_numbers) == 1)
        rest, _, _ = client.stream(path, body, x_request_id="a", x_resume_tokens=str(len(tokens)))
        whole = (TEXT + str(head.requests[0].sampling.seed)).encode()
        assert bytes(tokens + rest) == whole
        assert head.delivered[-1] == tuple(whole[:CUT_AFTER])


def test_what_nobody_comes_back_for_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/v1/completions"
    body = PATHS[path] | {"temperature": 1}
    monkeypatch.setattr(kept_answers, "MAX_CUT", 2)
    with cluster() as (_, keeper, client):
        for number in range(4):
            client.stream(path, body, 2, x_request_id=f"r{number}")
            assert wait_until(lambda number=number: len(keeper.cut_numbers) == number + 1)
        assert wait_until(lambda: len(keeper.held) == 2)
        monkeypatch.setattr(kept_answers, "CUT_S", 0.05)
        client.stream(path, body, 2, x_request_id="short")
        assert wait_until(lambda: len(keeper.held) == 1)


def test_the_cut_answers_of_one_tenant_leave_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "/v1/completions"
    body = PATHS[path] | {"temperature": 1}
    monkeypatch.setattr(kept_answers, "MAX_CUT", 4)
    options = ApiOptions(api_keys={"ka": "a", "kb": "b"})
    mine = {"x_request_id": "mine", "authorization": "Bearer ka"}
    with cluster(options=options) as (head, keeper, client):
        client.stream(path, body, 3, **mine)
        for number in range(8):
            theirs = {"x_request_id": f"r{number}", "authorization": "Bearer kb"}
            client.stream(path, body, 2, **theirs)
            assert wait_until(lambda number=number: len(keeper.cut_numbers) == number + 2)
        assert wait_until(lambda: len(keeper.held) == 4)
        rest, _, _ = client.stream(path, body, x_resume_tokens="9", **mine)
        assert bytes(rest) == (TEXT + str(head.requests[0].sampling.seed)).encode()[9:]


def test_an_answer_goes_on_so_often_without_a_new_admission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "/v1/completions"
    body = PATHS[path] | {"temperature": 0}
    monkeypatch.setattr(kept_answers, "MAX_RETURNS", 2)

    def script(_: Request) -> list[Step]:
        return [Output(tokens=(Token(97),)), 60.0]

    head, keeper = ScriptedHead(script), Keeper()
    with served(head, keeper=keeper, answers=KeptAnswers()) as url:
        client = Client(url)
        for number in range(4):
            client.stream(path, body, number % 3 + 1, x_request_id="a")
            assert wait_until(lambda number=number: len(head.aborted) == number + 1)
            assert wait_until(lambda: len(keeper.held) <= 1)
        assert head.delivered == [None, (97,), (97, 97), None]


def test_event_ids_go_on_from_what_is_known() -> None:
    path = "/v1/completions"
    body = PATHS[path] | {"temperature": 1, "stream": True}
    with cluster() as (head, keeper, client):
        ids, events = [], []
        first = {"last-event-id": "0", "x-request-id": "a"}
        for headers, most in ((first, 9), (first, 1 << 30)):
            sent = headers if not ids else {"last-event-id": ids[-1]}
            with client.http.stream("POST", path, json=body, headers=sent) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line.startswith("id: "):
                        ids.append(line[4:])
                    elif line.startswith("data: {"):
                        events.append(json.loads(line[6:])["choices"][0].get("token_ids", []))
                        most -= 1
                    if not most:
                        break
            assert most or wait_until(lambda: len(keeper.cut_numbers) == 1)
        whole = (TEXT + str(head.requests[0].sampling.seed)).encode()
        assert bytes(token for event in events for token in event) == whole
        assert head.delivered == [None, tuple(whole[:CUT_AFTER])]
