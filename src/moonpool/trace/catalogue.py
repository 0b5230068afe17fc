"""The public traces that can be downloaded: where they are, and what their bytes must be."""

from __future__ import annotations

from moonpool.types import Struct

_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release"
_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data"
_BURSTGPT = "https://github.com/HPMLL/BurstGPT/releases/download/v1.1"


class PublicTrace(Struct, frozen=True):
    """`sha256` is None where we know of no sum to compare with."""

    file_name: str
    url: str
    sha256: str | None
    licence: str


PUBLIC_TRACES = {
    "mooncake-conversation": PublicTrace(
        file_name="conversation_trace.jsonl",
        url=f"{_MOONCAKE}/traces/conversation_trace.jsonl",
        sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        licence="Apache-2.0",
    ),
    "mooncake-toolagent": PublicTrace(
        file_name="toolagent_trace.jsonl",
        url=f"{_MOONCAKE}/traces/toolagent_trace.jsonl",
        sha256="48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
        licence="Apache-2.0",
    ),
    "mooncake-synthetic": PublicTrace(
        file_name="synthetic_trace.jsonl",
        url=f"{_MOONCAKE}/traces/synthetic_trace.jsonl",
        sha256="bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        licence="Apache-2.0",
    ),
    "mooncake-arxiv": PublicTrace(
        file_name="mooncake_trace.jsonl",
        url=f"{_MOONCAKE}/arxiv-trace/mooncake_trace.jsonl",
        sha256="b434f1816a707f4bac697235588184ebc374c9907cb981bb65fb0643471fe711",
        licence="Apache-2.0",
    ),
    "azure-conversation": PublicTrace(
        file_name="AzureLLMInferenceTrace_conv.csv",
        url=f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
        sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        licence="CC-BY 4.0",
    ),
    "azure-code": PublicTrace(
        file_name="AzureLLMInferenceTrace_code.csv",
        url=f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
        sha256=None,
        licence="CC-BY 4.0",
    ),
    "burstgpt": PublicTrace(
        file_name="BurstGPT_1.csv",
        url=f"{_BURSTGPT}/BurstGPT_1.csv",
        sha256=None,
        licence="CC-BY 4.0",
    ),
}
"""By the name that `moonpool trace download` takes."""
