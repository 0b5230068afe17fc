"""Makes small traces for tests, and finds the real traces on a machine that has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[4] / "shared" / "traces"
CONVERSATION = SHARED / "conversation_trace.jsonl"
AZURE = SHARED / "AzureLLMInferenceTrace_conv.csv"

needs_conversation = pytest.mark.skipif(
    not CONVERSATION.exists(), reason="the conversation trace is not on this machine"
)
needs_azure = pytest.mark.skipif(
    not AZURE.exists(), reason="the Azure trace is not on this machine"
)


def line(time_ms: float, input_length: int, output_length: int, ids: list[int] | None) -> str:
    fields: dict[str, object] = {
        "timestamp": time_ms,
        "input_length": input_length,
        "output_length": output_length,
    }
    if ids is not None:
        fields["hash_ids"] = ids
    return json.dumps(fields) + "\n"


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
