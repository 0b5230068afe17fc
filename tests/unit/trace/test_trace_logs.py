"""Tests that logs of JSON lines, and vLLM's own logs, are read as traces, or refused with the
reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_traces import write

from moonpool.cli.logs import JsonFormatter
from moonpool.head.watch.request_log import request_fields
from moonpool.request_record import RequestRecord
from moonpool.trace.json_log import JsonLogParser
from moonpool.trace.reader import MAX_OTHER_LINES, Trace, open_trace
from moonpool.trace.row import OTHER_LINE, LineError, TraceError
from moonpool.trace.vllm_log import VllmLogParser
from moonpool.types import Slo
from tests.cli_runner import invoke

EPOCH_S = 1_714_564_800


def log(folder: Path, *lines: Any, name: str = "log.jsonl", format: str = "auto") -> Trace:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return open_trace(write(folder, name, text), format=format, spread_ticks=False)


def error_of(folder: Path, *lines: Any, **settings: str) -> str:
    with pytest.raises(TraceError) as caught:
        log(folder, *lines, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def usage(prompt: int = 12, answer: int = 3) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": answer}


FORMS: dict[str, Any] = {
    "flat, epoch": lambda n: {"timestamp": EPOCH_S + n, **usage()},
    "flat, ms": lambda n: {"timestamp": 1000 * (EPOCH_S + n), **usage()},
    "flat, us": lambda n: {"timestamp": 10**6 * (EPOCH_S + n), **usage()},
    "flat, text of ns": lambda n: {"startTimeUnixNano": str(10**9 * (EPOCH_S + n)), **usage()},
    "flat, relative ms": lambda n: {"time": 1000 * n, **usage()},
    "flat, relative s": lambda n: {"ts": n + 0.5, **usage()},
    "flat, date": lambda n: {"timestamp": f"2024-05-01T12:00:0{n}.25Z", **usage()},
    "flat, other names": lambda n: {"Arrival Time": n * 1000, "inputTokens": 12, "outputTokens": 3},
    "LiteLLM, spend log": lambda n: {
        "request_id": "a",
        "call_type": "acompletion",
        "startTime": f"2024-05-01 12:00:0{n}.123456",
        "endTime": "2024-05-01 12:00:09.5",
        "total_tokens": 15,
        "metadata": {"user_api_key": "x"},
        **usage(),
    },
    "LiteLLM, payload": lambda n: {
        "message": "logged",
        "timestamp": "2024-05-01T13:00:00Z",
        "kwargs": {
            "standard_logging_object": {
                "startTime": EPOCH_S + n + 0.25,
                "endTime": EPOCH_S + 9.0,
                "completionStartTime": EPOCH_S + 5.0,
                "model_map_information": {"model_map_value": {"max_input_tokens": 4096}},
                "response": {"created": EPOCH_S + 9, "usage": usage()},
                **usage(),
            }
        },
    },
    "OpenAI": lambda n: {
        "object": "chat.completion",
        "created": EPOCH_S + n,
        "choices": [{"message": {"content": "x"}}],
        "usage": usage() | {"prompt_tokens_details": {"cached_tokens": 4}},
    },
    "OpenAI, responses": lambda n: {
        "object": "response",
        "created_at": EPOCH_S + n + 0.0,
        "usage": {"input_tokens": 12, "output_tokens": 3, "input_tokens_details": {}},
    },
    "OpenAI, batch": lambda n: {
        "custom_id": "1",
        "response": {"status_code": 200, "body": {"created": EPOCH_S + n, "usage": usage()}},
        "error": None,
    },
    "Anthropic": lambda n: {
        "timestamp": EPOCH_S + n,
        "usage": {
            "input_tokens": 2,
            "cache_read_input_tokens": 9,
            "cache_creation_input_tokens": 1,
            "output_tokens": 3,
        },
    },
    "LangSmith": lambda n: {
        "run_type": "llm",
        "start_time": f"2024-05-01T12:00:0{n}.1+00:00",
        "end_time": "2024-05-01T12:00:09",
        "outputs": {"llm_output": {"token_usage": usage()}},
    },
    "Helicone": lambda n: {
        "request.created_at": f"2024-05-01T12:00:0{n}.1+00:00",
        "response.prompt_tokens": 12,
        "response.completion_tokens": 3,
    },
    "Langfuse": lambda n: {
        "startTime": f"2024-05-01T12:00:0{n}.1Z",
        "usage": {"input": 12, "output": 3, "total": 15, "unit": "TOKENS"},
    },
    "OpenTelemetry": lambda n: {
        "startTimeUnixNano": str(10**9 * (EPOCH_S + n)),
        "attributes": {"gen_ai.usage.input_tokens": 12, "gen_ai.usage.output_tokens": 3},
    },
    "logging": lambda n: {"asctime": f"2024-05-01 12:00:0{n},250", "usage": usage()},
    "numbers as text": lambda n: {"ts": f"{n}.5", "prompt_tokens": "12", "completion_tokens": 3.0},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_common_log_is_a_trace(form: str, tmp_path: Path) -> None:
    trace = log(tmp_path, *(FORMS[form](n) for n in range(3)))
    found = [(row.arrived_s, row.input_tokens, row.output_tokens) for row in trace]
    assert [row[1:] for row in found] == [(12, 3)] * 3
    assert [row[0] for row in found] == pytest.approx([0.0, 1.0, 2.0])
    info = trace.info
    assert (info.format, info.block_tokens, info.num_rows, info.other_lines) == ("log", 0, 3, 0)
    assert next(log(tmp_path, FORMS[form](0), format="log")).output_tokens == 3


def own_line(arrived_s: float, finished_s: float, tenant: str = "") -> str:
    """Returns a line in the form of `serve --log-requests --log-format json`."""
    record = RequestRecord(
        request_id="r", arrived_s=arrived_s, num_prompt_tokens=40, slo=Slo(ttft_s=1, tbt_s=1)
    )
    record.finished_s = finished_s
    record.tenant = tenant
    record.num_generated_tokens = 9
    line = logging.LogRecord("moonpool.request", logging.INFO, "", 0, "text", (), None)
    line.created = EPOCH_S + finished_s
    line.fields = request_fields(record)
    return JsonFormatter("head").format(line)


def test_the_log_of_a_moonpool_server_is_a_trace(tmp_path: Path) -> None:
    start = JsonFormatter("head").format(
        logging.LogRecord("moonpool.head", logging.INFO, "", 0, "1 of 2 instances are up", (), None)
    )
    lines = [
        *("nohup: ignoring input", start, own_line(2.0, 3.0), start),
        *(own_line(4.25, 4.5), own_line(1.0, 9.5, "ann")),
    ]
    trace = log(tmp_path, *lines, name="server.log")
    assert [row.arrived_s for row in trace] == pytest.approx([0.0, 1.0, 3.25], abs=2e-3)
    trace = log(tmp_path, *lines)
    assert [row.tenant for row in trace] == ["ann", "", ""]
    assert (trace.info.num_rows, trace.info.other_lines) == (3, 3)
    assert not trace.info.is_sorted, "the longest request was logged last"


def test_lines_that_are_no_requests_are_counted_and_told(tmp_path: Path) -> None:
    lines = [FORMS["OpenAI"](n) for n in range(4)]
    lines.insert(1, {"created": EPOCH_S, "usage": None})
    lines.insert(2, {"level": "info", "message": "ready"})
    lines.insert(0, "plain text")
    lines.append({"created": EPOCH_S + 9, "usage": usage(answer=0)})
    info = log(tmp_path, *lines).info
    assert (info.num_rows, info.skipped_rows, info.other_lines) == (4, 1, 3)
    path = str(tmp_path / "log.jsonl")
    shown = invoke("trace", "info", path, terminal_width=200).output
    assert "4 (1 without prompt or answer and 3 lines that are no requests" in " ".join(
        shown.replace("│", " ").split()
    )
    done = invoke("simulate", "--trace", path, "--prefill", "1", "--decode", "1")
    assert done.exit_code == 0 and "left out: 3 lines, which are no requests" in done.stderr
    assert "cannot show which prompts share a prefix" in done.stdout


def test_a_file_of_other_lines_is_given_up(tmp_path: Path) -> None:
    text = error_of(tmp_path, *[{"level": "info"}] * (MAX_OTHER_LINES + 5))
    assert f":{MAX_OTHER_LINES + 1}: " in text and "the fields found are level" in text
    row = FORMS["OpenAI"](0)
    text = error_of(tmp_path, row, *[{"level": "info"}] * (MAX_OTHER_LINES + 500))
    assert "lines so far are no requests, and 1 are; keep the lines of requests only" in text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"time": 1, "prompt": "x", "nested": {"tokens": 3}}, "nested.tokens: rename them"),
        ({"prompt_tokens": 1, "completion_tokens": 2}, "no line has an arrival (timestamp,"),
        ({"time": 1, "completion_tokens": 2}, "no line has the tokens of the prompt (prompt_"),
        ({"time": 1, "prompt_tokens": 2}, "no line has the tokens of the answer (completion_"),
        ({"time": 1, "prompt_tokens": -2, "completion_tokens": 2}, ":1: prompt_tokens is -2; it"),
        ({"time": 1, "usage": usage(answer=True)}, "usage.completion_tokens is True; it must be"),
        ({"time": 1, "usage": usage() | {"prompt_tokens": 1.5}}, "1.5; it must be an integer"),
        ({"time": 1, "usage": usage(10**10)}, "it must be between 0 and 1000000000"),
        ({"time": "soon", **usage()}, "time is 'soon'; it must be a time: seconds or"),
        ({"time": -1, **usage()}, "time is -1; it must be a finite number, 0 or more"),
        ({"time": "nan", **usage()}, "must be a finite number"),
        ({"time": 10**30, **usage()}, "must be a finite number"),
        ({"time": "9" * 40, **usage()}, "must be a finite number"),
        ({"time": 1, "usage": usage(10**400)}, "it must be an integer"),
    ],
)
def test_a_log_that_cannot_be_used_is_refused_with_the_reason(
    row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    text = error_of(tmp_path, row, row)
    assert words in text and "mooncake" not in text


def test_times_of_two_kinds_and_damaged_lines_are_named(tmp_path: Path) -> None:
    first = FORMS["flat, epoch"](0)
    assert ":2: timestamp is 5: the times of this log" in error_of(
        tmp_path, first, {"timestamp": 5, **usage()}
    )
    assert ":2: this line is not one JSON object" in error_of(tmp_path, first, '{"timestamp": 1,')
    path = write(tmp_path, "cut.jsonl", json.dumps(first) + '\n{"timest')
    with pytest.raises(TraceError, match="may be cut off"):
        open_trace(path)
    assert "`jq -c . FILE`" in error_of(tmp_path, "{", '"timestamp": 1', "}")


# Logs of vLLM:

ASKED = "Received request %s: prompt: %r, params: SamplingParams(n=1), prompt_token_ids: %s, x."
ANSWERED = "Generated response %s: output: %r, output_token_ids: %s, finish_reason: stop"


def vllm_line(second: int, text: str) -> str:
    return f"(APIServer pid=7) INFO 11-20 10:11:{second:02d} [logger.py:42] {text}"


def test_vllms_own_log_is_a_trace(tmp_path: Path) -> None:
    misleading = "prompt_token_ids: [1]"
    lines = [
        vllm_line(0, "vLLM API server version 0.10.0"),
        vllm_line(1, ASKED % ("a", misleading, [1, 2, 3])),
        vllm_line(2, ASKED % ("b", "x", [1, 2])),
        vllm_line(3, "Generated response b (streaming delta): output: 'x', output_token_ids: [4]"),
        vllm_line(4, ANSWERED % ("b", "output_token_ids: [1]", [4, 5])),
        vllm_line(9, ANSWERED % ("a", "y", [7])),
    ]
    trace = log(tmp_path, *lines, name="vllm.log")
    found = [(row.arrived_s, row.input_tokens, row.output_tokens) for row in trace]
    assert found == [(0.0, 3, 1), (1.0, 2, 2)]
    assert (trace.info.format, trace.info.other_lines) == ("vllm", 4)
    again = error_of(tmp_path, *lines, vllm_line(30, ASKED % ("a", "x", [1])), name="vllm.log")
    assert "the request a comes twice" in again


def test_vllms_log_as_objects_is_a_trace(tmp_path: Path) -> None:
    lines = [
        {"timestamp": f"2024-05-01 12:00:0{n},500", "levelname": "INFO", "message": text}
        for n, text in enumerate(
            ("Request c details: prompt: 'x', prompt_token_ids: [1, 2].", ANSWERED % ("c", "", [3]))
        )
    ]
    for format in ("auto", "vllm"):
        (row,) = log(tmp_path, *lines, format=format)
        assert (row.input_tokens, row.output_tokens) == (2, 1)


def test_vllms_log_without_token_ids_says_what_to_do(tmp_path: Path) -> None:
    line = vllm_line(1, "Received request a: params: SamplingParams(n=1), lora_request: None.")
    text = error_of(tmp_path, line, name="vllm.log")
    assert "this is vLLM's log, which leaves out the token ids of 1 prompts or answers" in text
    assert "--log-requests --log-format json" in text


# Any text at all:

NAMES = st.sampled_from(["usage", "time", "created", "prompt_tokens", "completion_tokens", "a\nb"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(lines=st.lists(st.dictionaries(NAMES, VALUES), max_size=4))
def test_any_object_is_a_row_no_row_or_a_line_that_says_why(lines: list[dict[str, Any]]) -> None:
    texts = [json.dumps(line, allow_nan=False).encode() for line in lines if finite(line)]
    for parser in (JsonLogParser(texts), VllmLogParser()):
        told = ""
        for text in texts:
            try:
                row = parser.parse(text)
            except LineError as error:
                told += str(error)
            else:
                assert row is None or row is OTHER_LINE or row.input_tokens > 0
        assert "\n" not in told + parser.why_none()


def finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True
