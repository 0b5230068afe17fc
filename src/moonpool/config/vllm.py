"""The configuration of the servers that a cluster stands in front of: vLLM, and other makes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from moonpool.config.schema import about
from moonpool.types import Struct

_RANK = re.compile(r"@(\d{1,4})$")


def split_rank(address: str) -> tuple[str, int | None]:
    """Splits "URL@RANK" of a server with several data-parallel ranks. The rank of others is
    None."""
    found = _RANK.search(address)
    return (address[: found.start()], int(found[1])) if found else (address, None)


class VllmAddress(Struct, frozen=True):
    """Addresses of a server: HTTP, its KV events and their replay. `slots`: the folder in which a
    llama-server saves slots, or "" if it saves none."""

    url: str
    events: str = ""
    replay: str = ""
    slots: str = ""


Parsers = Literal["vllm", "moonpool"]


class VllmConfig(Struct, frozen=True):
    """The servers that serve as instances, by role, each as "URL", "URL@RANK", "URL,EVENTS",
    "URL,EVENTS,REPLAY" or "URL,SLOTS" (see `vllm_place`), and what is left to them."""

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
            "A running vLLM, SGLang, llama-server or OpenAI-like server as mixed instance; EVENTS"
            " sends KV events, REPLAY repeats them, SLOTS is a llama-server's --slot-save-path.",
            "--vllm",
            metavar="URL[,EVENTS[,REPLAY]|,SLOTS]",
        ),
    ] = ()
    endpoints: Annotated[
        tuple[str, ...],
        about(
            "Where vLLM servers that come and go are listed: a file in llm-d's endpoints.yaml form,"
            " dns://NAME:PORT, srv://NAME, kube://NAMESPACE/LABEL=VALUE?port=8000 for pods by"
            " label, ray://NAMESPACE/ACTOR?port=8000 for actors of Ray, or ray-serve://APPLICATION"
            " for replicas; repeat the flag for more.",
            "--vllm-endpoints",
            metavar="SOURCE...",
        ),
    ] = ()
    parsers: Annotated[
        Parsers,
        about(
            "Who finds tool calls and reasoning in answers: vllm (where it parses them, from the"
            " client's own body), or moonpool (the answer then outlives its server).",
            "--vllm-parsers",
        ),
    ] = "vllm"

    @property
    def places(self) -> dict[str, tuple[str, ...]]:
        """The servers by role."""
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}

    @property
    def first(self) -> str:
        """The instance of the first server; "" means that no server is named first."""
        return next((f"{role}-0" for role, named in self.places.items() if named), "")

    @property
    def names_any(self) -> bool:
        return any(self.places.values()) or bool(self.endpoints)
