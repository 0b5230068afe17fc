"""The configuration of the vLLM servers that a cluster stands in front of."""

from __future__ import annotations

from typing import Annotated

from moonpool.config_schema import about
from moonpool.types import Struct


class VllmAddress(Struct, frozen=True):
    """Addresses of a vLLM: its HTTP server, its KV events and their replay. "": it has none."""

    url: str
    events: str = ""
    replay: str = ""


class VllmConfig(Struct, frozen=True):
    """The vLLM servers that serve as instances, by role, each as "URL", "URL,EVENTS" or
    "URL,EVENTS,REPLAY" (see `vllm_place`)."""

    prefill: Annotated[
        tuple[str, ...],
        about(
            "A running vLLM server as prefill instance; repeat the flag for more.",
            "--vllm-prefill",
            metavar="URL...",
        ),
    ] = ()
    decode: Annotated[
        tuple[str, ...],
        about(
            "A running vLLM server as decode instance; repeat the flag for more.",
            "--vllm-decode",
            metavar="URL...",
        ),
    ] = ()
    mixed: Annotated[
        tuple[str, ...],
        about(
            "A running vLLM server as mixed instance; EVENTS sends KV events, REPLAY repeats them.",
            "--vllm",
            metavar="URL[,EVENTS[,REPLAY]]",
        ),
    ] = ()
