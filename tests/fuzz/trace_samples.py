"""Makes files of each form of traces, which the fuzzers change."""

from __future__ import annotations

TRACES = (
    b'{"timestamp": 0, "input_length": 900, "output_length": 5, "hash_ids": [1, 2]}\n'
    b'{"timestamp": 27, "input_length": 400, "output_length": 9, "hash_ids": [1]}\n' * 3,
    (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        b"2023-11-16 18:17:04.0319569,110,27\n"
    ),
    (
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        b"5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n"
    ),
    (
        b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 16, '
        b'"output_length": 4, "type": "text", "turn": 1, "hash_ids": [3]}\n'
    ),
)
AGENTS = (
    (
        b'{"session_id": "a", "text_input": "x y", "output_length": 5.0, "tenant": null}\n'
        b'{"session_id": "a", "input_length": 70.0, "output_length": 5, "delay": 2.5}\n'
        b'{"session_id": "b", "messages": [{"role": "user", "content": [{"text": "q"}]}]}\n'
        b'{"session_id": "c", "payload": {"prompt": [1, 2], "max_tokens": 3}}\n'
    ),
    b'{"session_id": "a", "turns": [{"text": "x"}, {"texts": ["y"], "delay": 3}]}\n',
    (
        b'{"request_id": "b", "wait_for": ["a"], "input_length": 9, "output_length": 2}\n'
        b'{"request_id": "a", "timestamp": 5, "input_length": 9, "output_length": 2}\n'
    ),
    (
        b'{"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 16}\n'
        b'{"request_id": "b", "play_id": "p", "session_id": "s", "input_tokens": 9, '
        b'"output_tokens": 2, "hash_ids": [1], "not_before_ms": 1, "dependencies": '
        b'[{"request_id": "a", "trigger": "dispatch", "delay_ms": 2}]}\n'
        b'{"request_id": "a", "play_id": "p", "input_length": 9, "output_length": 2}\n'
    ),
    (
        b'{"id": "w", "block_size": 4, "requests": [{"t": 0, "in": 5, "out": 2, "hash_ids": [1]}, '
        b'{"type": "subagent", "requests": [{"t": 1, "in": 5, "out": 2}]}]}\n' * 2
    ),
    (
        b'{"trace_id": "t", "spans": [{"start_time": "2026-01-01T00:00:00Z", "end_time": null, '
        b'"attributes": {"gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": "2"}}]}\n'
    ),
    (
        b'{"session_id": "r", "turns": [{"messages": [], "spawns": ["c"]}, {"messages": ["x"], '
        b'"delay": 3, "max_tokens": 4, "forks": [{"child": "f"}]}]}\n'
        b'{"session_id": "c", "turns": [{"messages": [{"content": "q"}]}]}\n'
        b'{"session_id": "f", "turns": [{"messages": [{"content": "q"}]}]}\n'
    ),
    (
        b'{"schema": "dynamo.request.trace.v1", "event_type": "request_end", '
        b'"event_time_unix_ms": 9, "agent_context": {"session_id": "s"}, '
        b'"request": {"request_received_ms": 5, '
        b'"output_tokens": 2, "replay": {"trace_block_size": 4, "input_length": 5, '
        b'"input_sequence_hashes": [1, 2]}}}\n'
    ),
    (
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "t", "spanId": "a", '
        b'"parentSpanId": "b", "startTimeUnixNano": "1", "endTimeUnixNano": "2", "attributes": '
        b'[{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "9"}}, '
        b'{"key": "gen_ai.usage.output_tokens", "value": {"intValue": "2"}}]}]}]}]}\n'
    ),
    b'{"texts": ["a b", "c"], "timestamp": 3, "output_length": 4}\n{"text": "d"}\n',
    (
        b'{"id": 1, "conversations": [{"from": "human", "value": "a"}, '
        b'{"from": "gpt", "value": "b"}]}\n'
    ),
)
LOGS = (
    (
        b'{"startTime": 1714564800.5, "endTime": 1714564805, "prompt_tokens": 30, '
        b'"completion_tokens": 7, "metadata": {"usage": null}}\n'
        b'{"startTime": "2024-05-01T12:00:09.25Z", "prompt_tokens": 9, "completion_tokens": 2}\n'
    ),
    (
        b"nohup: ignoring input\n"
        b'{"time": "2026-11-28T01:09:09.466Z", "level": "info", "message": "up"}\n'
        b'{"time": "2026-11-28T01:09:12.000Z", "outcome": "stop", "prompt_tokens": 20, '
        b'"generated_tokens": 9, "total_s": 2.5, "tenant": "ann"}\n'
    ),
    b'{"created": 1714564800, "usage": {"input_tokens": 4, "output_tokens": 3, "x": [1]}}\n' * 2,
    (
        b"INFO 11-20 10:11:01 [logger.py:42] Received request a: prompt: 'x', params: S(), "
        b"prompt_token_ids: [1, 2], lora_request: None.\n"
        b"INFO 11-20 10:11:04 [logger.py:88] Generated response a: output: 'y', "
        b"output_token_ids: [3, 4], finish_reason: stop\n"
    ),
)
