"""Tests the reader with traces in every format: the order of time, ticks, bounded memory, and
errors of one line."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sample_traces import (
    AZURE,
    CONVERSATION,
    line,
    needs_azure,
    needs_conversation,
    write,
)

from moonpool.trace.reader import find_tick, open_trace, spread
from moonpool.trace.row import ParsedRow, TraceError, TraceRow

AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST_HEAD = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        list(open_trace(path, **options))
    text = str(caught.value)
    assert "\n" not in text
    assert path.name in text
    return text


def test_mooncake_rows(tmp_path: Path) -> None:
    text = line(1000, 600, 5, [0, 1]) + line(2500, 512, 7, [0])
    trace = open_trace(write(tmp_path, "a.jsonl", text))
    assert list(trace) == [TraceRow(0.0, 600, 5, (0, 1)), TraceRow(1.5, 512, 7, (0,))]
    assert trace.info.block_tokens == 512
    assert (trace.info.format, trace.info.num_rows, trace.info.duration_s) == ("mooncake", 2, 1.5)


def test_a_trace_is_an_iterator(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path, "a.jsonl", line(0, 1, 1, [3]) + line(9, 1, 1, [4])))
    assert next(trace).hash_ids == (3,)
    assert [row.hash_ids for row in trace] == [(4,)]


def test_mooncake_in_seconds_and_without_hashes(tmp_path: Path) -> None:
    text = line(0.25, 600, 5, None) + line(2.5, 512, 7, None)
    trace = open_trace(write(tmp_path, "a.jsonl", text))
    assert [row.arrived_s for row in trace] == [0.0, 2.25]
    assert trace.info.block_tokens == 0


def test_session_ids_and_foreign_fields_of_mooncakes_format(tmp_path: Path) -> None:
    text = '{"timestamp":0,"input_length":1,"output_length":1,"session_id":"x","delay":3}\n'
    assert [row.session for row in open_trace(write(tmp_path, "a.jsonl", text))] == ["x"]


def test_unused_fields_are_accepted_and_listed(tmp_path: Path) -> None:
    text = '{"timestamp":0,"input_length":1,"output_length":1,"model":"x","hints":{"a":[1]}}\n'
    trace = open_trace(write(tmp_path, "a.jsonl", text + line(5, 2, 2, None)))
    assert trace.info.ignored == ("model", "hints")
    assert [row.input_tokens for row in trace] == [1, 2]
    head = ",TIMESTAMP,ContextTokens,GeneratedTokens,region\n"
    csv = open_trace(write(tmp_path, "a.csv", f"{head}0,2023-11-16 10:00:00.0,5,6,west\n"))
    assert csv.info.ignored == ("", "region")
    assert [(row.input_tokens, row.output_tokens) for row in csv] == [(5, 6)]


@pytest.mark.parametrize("block", [16, 64, 256, 1024])
def test_blocks_of_another_size_are_found(tmp_path: Path, block: int) -> None:
    lengths = [1, 3 * block, 3 * block + 1, 9 * block - 1]
    text = "".join(
        line(t, length, 1, list(range(-(-length // block)))) for t, length in enumerate(lengths)
    )
    trace = open_trace(write(tmp_path, "a.jsonl", text))
    assert (trace.info.block_tokens, trace.info.num_rows) == (block, 4)


def test_blocks_are_of_512_where_the_rows_leave_it_open(tmp_path: Path) -> None:
    assert open_trace(write(tmp_path, "a.jsonl", line(0, 100, 1, [0]))).info.block_tokens == 512
    text = error_of(write(tmp_path, "b.jsonl", line(0, 600, 1, [0])))
    assert "1 hash_ids for input_length 600; with one per 512 tokens there must be 2" in text


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, is_sorted: bool) -> None:
    times = (0, 7) if is_sorted else (7, 0)
    text = "\ufeff" + "".join(line(time, 1, 1, None).replace("\n", "\r\n") for time in times)
    rows = open_trace(write(tmp_path, "a.jsonl", text), spread_ticks=False)
    assert [row.arrived_s for row in rows] == [0.0, 0.007]
    csv = open_trace(write(tmp_path, "a.csv", f"\ufeff{AZURE_HEAD}2023-11-16 10:00:00.0,5,6\r\n"))
    assert [row.input_tokens for row in csv] == [5]


@pytest.mark.parametrize(
    ("head", "first", "second"),
    [
        ("timestamp,input_length,output_length\n", "500,7,3", "2000,8,4"),
        ("timestamp,input_length,output_length\n", "0.5,7,3", "2,8,4"),
        ("Prompt Tokens,Completion Tokens,Time,model\n", "7,3,1763000000,a", "8,4,1763000001.5,b"),
        ("time,prompt_tokens,completion_tokens\n", "1763000000000,7,3", "1763000001500,8,4"),
        ("time,prompt_tokens,completion_tokens\n", "1763000000000000,7,3", "1763000001500000,8,4"),
        (
            "arrived_at,input_tokens,output_tokens,session\n",
            '"2026-01-02T03:04:05.25Z",7,3,s',
            '"2026-01-02T03:04:06.75Z",8,4,s',
        ),
    ],
)
def test_a_log_of_ones_own(tmp_path: Path, head: str, first: str, second: str) -> None:
    path = write(tmp_path, "log.csv", f"{head}{first}\n{second}\n")
    for format in ("auto", "log"):
        trace = open_trace(path, format=format)
        rows = [(row.arrived_s, row.input_tokens, row.output_tokens) for row in trace]
        assert rows == [(0.0, 7, 3), (1.5, 8, 4)]
        assert trace.info.format == "log"
    if "session" in head:
        assert [row.session for row in open_trace(path)] == ["s", "s"]


@pytest.mark.parametrize(
    "head",
    [
        "timestamp,input_length,output_length,slo_class",
        "Time,Prompt Tokens,Completion Tokens,SLO Class",
        "arrived_at,num_prefill_tokens,num_decode_tokens,slo_class",
    ],
)
def test_any_csv_file_may_name_classes(tmp_path: Path, head: str) -> None:
    trace = open_trace(write(tmp_path, "a.csv", f'{head}\n0.5,7,3,chat\n2,8,4,\n3,8,4,"a,b"\n'))
    assert [row.slo_class for row in trace] == ["chat", "", "a,b"]
    assert "slo_class" not in " ".join(trace.info.ignored).lower().replace(" ", "_")


def test_a_log_without_a_column_says_what_to_name_it(tmp_path: Path) -> None:
    path = write(tmp_path, "log.csv", "when,prompt_tokens,completion_tokens\n1,2,3\n")
    assert "name them timestamp,prompt_tokens,completion_tokens" in error_of(path)
    assert "name them timestamp,prompt_tokens" in error_of(path, format="log")
    broken = 'timestamp,prompt_tokens,completion_tokens\n1,2,3\n"2,3,4\n'
    assert "log.csv:3: the quotes of this row are wrong" in error_of(
        write(tmp_path, "log.csv", broken)
    )


def test_bailian_has_blocks_of_16_and_seconds(tmp_path: Path) -> None:
    text = (
        '{"chat_id":7,"parent_chat_id":-1,"timestamp":61.5,"input_length":33,"output_length":2,'
        '"type":"text","turn":1,"hash_ids":[1,2,3]}\n'
        '{"chat_id":8,"parent_chat_id":7,"timestamp":62.0,"input_length":33,"output_length":2,'
        '"type":"text","turn":2,"hash_ids":[1,2]}\n'
    )
    trace = open_trace(write(tmp_path, "a.jsonl", text))
    assert list(trace) == [
        TraceRow(0.0, 33, 2, (1, 2, 3), "7"),
        TraceRow(0.5, 33, 2, (1, 2), "8"),
    ]
    assert (trace.info.format, trace.info.block_tokens) == ("bailian", 16)


@pytest.mark.parametrize(
    ("head", "first", "second"),
    [
        (AZURE_HEAD, "2023-11-16 23:59:59.9999999,5,6", "2023-11-17 00:00:00.0000001,5,6"),
        (
            AZURE_HEAD,
            "2024-05-10 10:00:59.9999999+00:00,5,6",
            "2024-05-10 10:01:00.0000001+00:00,5,6",
        ),
        (
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n",
            "2023-11-16 23:59:59.9999999,1,5,6",
            "2023-11-17 00:00:00.0000001,0,5,6",
        ),
    ],
)
def test_azure_to_100_ns(tmp_path: Path, head: str, first: str, second: str) -> None:
    # There is no newline at the end, as in the published file.
    trace = open_trace(write(tmp_path, "a.csv", f"{head}{first}\r\n{second}"))
    assert list(trace) == [TraceRow(0.0, 5, 6), TraceRow(2e-7, 5, 6)]
    assert (trace.info.format, trace.info.block_tokens) == ("azure", 0)


def test_burstgpt_with_failures(tmp_path: Path) -> None:
    rows = (
        "5,12,1.5,ChatGPT,472,18,490,Conversation log\n"
        "45,,0,GPT-4,9,0,9,API log\n"
        "46,3,1,GPT-4,8.0,2,10,API log\n"
    )
    trace = open_trace(write(tmp_path, "a.csv", BURST_HEAD + rows))
    assert list(trace) == [TraceRow(0.0, 472, 18, (), "12"), TraceRow(41.0, 8, 2, (), "3")]
    assert (trace.info.num_rows, trace.info.skipped_rows) == (2, 1)


def test_burstgpt_of_older_mirrors(tmp_path: Path) -> None:
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    trace = open_trace(
        write(tmp_path, "a.csv", head + '5,"ChatGPT",472,18,490,"Conversation, log"\n')
    )
    assert list(trace) == [TraceRow(0.0, 472, 18)]
    assert trace.info.format == "burstgpt"


def test_vidur(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,374,44\n4.75,396,109\n"
    assert list(open_trace(write(tmp_path, "a.csv", text))) == [
        TraceRow(0.0, 374, 44),
        TraceRow(4.25, 396, 109),
    ]


def test_unsorted_files_come_in_order_of_time_and_ties_in_order_of_the_file(tmp_path: Path) -> None:
    times = [500, 100, 900, 100, 0, 900]
    text = "".join(line(t, 1, 1, [number]) for number, t in enumerate(times))
    trace = open_trace(write(tmp_path, "a.jsonl", text), spread_ticks=False)
    assert [(row.arrived_s, row.hash_ids[0]) for row in trace] == [
        (0.0, 4),
        (0.1, 1),
        (0.1, 3),
        (0.5, 0),
        (0.9, 2),
        (0.9, 5),
    ]
    assert not trace.info.is_sorted


def test_many_ties_of_an_unsorted_file_stay_in_order(tmp_path: Path) -> None:
    text = "".join(line(500 - 500 * (n % 2), 1, 1, [n]) for n in range(200))
    rows = list(open_trace(write(tmp_path, "a.jsonl", text), spread_ticks=False))
    assert [row.hash_ids[0] for row in rows] == [*range(1, 200, 2), *range(0, 200, 2)]


def test_unsorted_azure_keeps_its_100_ns(tmp_path: Path) -> None:
    text = AZURE_HEAD + "2023-11-16 10:00:00.0000002,2,1\n2023-11-16 10:00:00.0000001,1,1\n"
    rows = list(open_trace(write(tmp_path, "a.csv", text)))
    assert [(row.arrived_s, row.input_tokens) for row in rows] == [(0.0, 1), (1e-7, 2)]


def ticked(num_ticks: int, rows_per_tick: int, step_ms: int) -> str:
    return "".join(
        line(tick * step_ms + tick % 2, 1, 1, [tick * rows_per_tick + number])
        for tick in range(num_ticks)
        for number in range(rows_per_tick)
    )


def test_rows_are_spread_evenly_over_ticks_in_the_files_order(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", ticked(20, 4, 2000))
    trace = open_trace(path)
    rows = list(trace)
    assert trace.info.tick_s == pytest.approx(2.0, rel=0.01)
    assert [row.hash_ids[0] for row in rows] == list(range(80))
    gaps = [b.arrived_s - a.arrived_s for a, b in pairwise(rows)]
    assert min(gaps) > 0.49 and max(gaps) < 0.51
    bare = list(open_trace(path, spread_ticks=False))
    assert [row.arrived_s for row in bare[:5]] == [0.0, 0.0, 0.0, 0.0, 2.001]


def test_a_tick_that_came_early_takes_no_rows_past_the_next() -> None:
    rows = [ParsedRow(time, 1, 1) for time in (0, 0, 10, 10, 14, 14)]
    assert [row.time for row in spread(rows, 10)] == [0, 5, 10, 12, 14, 19]


def test_two_requests_of_one_millisecond_are_no_tick() -> None:
    assert find_tick([0, 7, 7, 30, 41, 77, 90, 123]) == 0.0
    assert find_tick([0, 0, 0]) == 0.0
    assert find_tick([0, 0, 3000, 3000, 9001, 9001, 12_000]) == pytest.approx(3000, rel=0.01)


def test_speed_and_limit(tmp_path: Path) -> None:
    text = "".join(line(1000 * t, 1, 1, [t]) for t in range(10))
    path = write(tmp_path, "a.jsonl", text)
    assert [r.arrived_s for r in open_trace(path, speed=2.0, limit=3)] == [0.0, 0.5, 1.0]
    for options in ({"speed": 0.0}, {"speed": float("nan")}, {"limit": 0}):
        with pytest.raises(TraceError):
            open_trace(path, **options)


GOOD = line(0, 600, 5, [0, 1])
WRONG_LINES = [
    (
        line(1, 600, 5, [0]),
        "1 hash_ids for input_length 600; with one per 512 tokens there must be 2",
    ),
    (line(1, 600, 5, None), "this row has no hash_ids"),
    (line(-1, 600, 5, [0, 1]), "timestamp is -1; it must be a finite number, 0 or more"),
    (
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n',
        "is not one JSON object",
    ),
    (
        '{"timestamp": 1e999, "input_length": 1, "output_length": 1}\n',
        "is not one JSON object",
    ),
    (line(1, -600, 5, [0, 1]), "input_length is -600; it must be between 0 and"),
    (line(1, 10**12, 5, [0, 1]), "input_length is 1000000000000; it must be"),
    ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}\n', "input_length is 1.5; it must"),
    ('{"timestamp": 1, "input_length": 1, "output_length": true}\n', "output_length is True"),
    ('{"timestamp": 1, "input_length": "1", "output_length": 1}\n', "input_length is '1'"),
    ('{"timestamp": 1, "output_length": 1, "hash_ids": []}\n', "this row has no input_length"),
    ('{"timestamp": 1, "inptu_length": 1, "output_length": 1}\n', "did you mean input_length?"),
    (
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 5}\n',
        "hash_ids is not a list",
    ),
    (
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["x"]}\n',
        "has a wrong value",
    ),
    (line(1, 600, 5, [0, 1])[:-20], "cut off"),
    ("[1, 2]\n", "this is a JSON list"),
    ("[" * 100_000 + "\n", "this is a JSON list"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_LINES)
def test_a_wrong_line_is_named_before_the_first_row(tmp_path: Path, wrong: str, words: str) -> None:
    path = write(tmp_path, "a.jsonl", GOOD * 3 + wrong)
    with pytest.raises(TraceError) as caught:
        open_trace(path)  # raises without a request for any row
    assert words in str(caught.value)
    assert f"{path.name}:4: " in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2023-13-16 10:00:00.0,1,1", "is not a time; it must look like"),
        ("2023-11-16 10:00:99.0,1,1", "is not a time; it must look like"),
        ("2023-11-16 10:00:00.x,1,1", "is not a time; it must look like"),
        ("nan,1,1", "is not a time; it must look like"),
        ("2023-11-16 10:00:00.0,1", "the row has 2 columns, the header 3"),
        ("2023-11-16 10:00:00.0,1,-1", "GeneratedTokens is '-1'; it must be between"),
        ("2023-11-16 10:00:00.0,1e400,1", "ContextTokens is '1e400'; it must be an integer"),
        ("2023-11-16 10:00:00.0,nan,1", "ContextTokens is 'nan'; it must be an integer"),
        ("2023-11-16 10:00:00.0,1_0,1.5", "must be an integer"),
        ("2023-11-16 10:00:00.0,,1", "ContextTokens is ''"),
        ('2023-11-16 10:00:00.0,"1,1', "the quotes of this row are wrong"),
    ],
)
def test_a_wrong_csv_line(tmp_path: Path, row: str, words: str) -> None:
    text = error_of(write(tmp_path, "a.csv", f"{AZURE_HEAD}{row}\n"))
    assert words in text and "a.csv:2: " in text


@pytest.mark.parametrize("cell", ["nan", "inf", "-inf", "-1", "x", ""])
def test_wrong_times_in_seconds(tmp_path: Path, cell: str) -> None:
    text = f"arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n{cell},374,44\n"
    assert "it must be a finite number, 0 or more" in error_of(write(tmp_path, "a.csv", text))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n", "is empty"),
        ("a.csv", AZURE_HEAD.encode(), "has no requests"),
        ("a.csv", (BURST_HEAD + "1,,,m,5,0,5,x\n").encode(), "1 rows have no prompt or no answer"),
        ("a.jsonl", AZURE_HEAD.encode(), "named .jsonl, but this line is not a JSON object"),
        ("a.csv", GOOD.encode(), "named .csv, but this line is JSON"),
        ("a.jsonl", b"\x00\x01\x02binary", "not a JSON object"),
        ("a.bin", b"\xff\xfe\x00\x01binary\n", "binary data"),
        ("a.bin", b"\xff\xfebinary\n", "not valid UTF-8"),
        ("a.jsonl", GOOD.encode() + b"\xff\xfe\n", "not valid UTF-8"),
        ("a.jsonl", GOOD.encode() + b'{"timestamp\x00\n', "binary data"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "is compressed"),
        ("a.csv", b"TIMESTAMP,ContextToken,GeneratedTokens\n", "did you mean ContextTokens?"),
        ("a.csv", BURST_HEAD.replace("Session ID", "Sesion ID").encode(), "did you mean Session"),
        ("a.jsonl", GOOD.replace("hash_ids", "hash_id").encode(), "did you mean hash_ids?"),
        ("a.jsonl", b"[\n" + GOOD.encode() + b"]\n", "convert it by `jq"),
        ("a.csv", b"TIMESTAMP,ContextTokens\n", "has no column GeneratedTokens"),
        ("a.csv", b"timestam,b\n1,2\n", "match no known format; did you mean Timestamp?"),
        ("a.csv", b"TIMESTAMP,TIMESTAMP\n", "appears twice"),
        ("a.csv", b"num_prefill_tokens,num_decode_tokens\n1,2\n", "lengths without arrivals"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    assert words in error_of(write(tmp_path, name, content))


def test_missing_files_folders_and_formats(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "none.jsonl")
    assert "directory" in error_of(tmp_path)
    path = write(tmp_path, "a.jsonl", GOOD)
    assert "the format is azure, but this line is JSON" in error_of(path, format="azure")
    with pytest.raises(TraceError, match="unknown trace format 'x'"):
        open_trace(path, format="x")  # type: ignore[arg-type]


def test_a_line_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(GOOD.encode() + b'{"timestamp": ')
        file.truncate(1 << 30)  # makes a sparse file, which takes no disk space
    peaks = []
    for _ in range(3):  # tries again, because a thread of an earlier test may allocate, too
        tracemalloc.start()
        text = error_of(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert "longer than 8 MiB" in text and ":2:" in text
    assert min(peaks) < 40 << 20


def test_memory_does_not_grow_with_a_sorted_file(tmp_path: Path) -> None:
    peaks = []
    for num_rows in (2_000, 20_000):
        text = "".join(line(20 * t, 1000, 1, [2 * t, 2 * t + 1]) for t in range(num_rows))
        path = write(tmp_path, f"{num_rows}.jsonl", text)
        tracemalloc.start()
        assert sum(1 for _ in open_trace(path)) == num_rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] + 600_000  # allows for the sample in which ticks are searched


@needs_conversation
def test_the_conversation_trace() -> None:
    trace = open_trace(CONVERSATION)
    rows = list(trace)
    assert len(rows) == 12_031
    assert trace.info.tick_s == pytest.approx(3.0, rel=0.001)
    arrivals = [row.arrived_s for row in rows]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 12_031


@needs_azure
def test_the_azure_trace() -> None:
    trace = open_trace(AZURE)
    rows = list(trace)
    assert len(rows) == 19_366
    assert (trace.info.is_sorted, trace.info.tick_s) == (True, 0.0)
    assert trace.info.duration_s == pytest.approx(3501.721937)
