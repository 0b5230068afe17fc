"""The description of a server that it offers to a head."""

from __future__ import annotations

from typing import Literal

from moonpool.types import Struct

COMPLETIONS = "/v1/completions"
MEDIA_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Endpoints of vLLM whose prompts may hold images and sounds."""
POOLING_PATHS = (
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
"""Endpoints of vLLM for models that generate nothing."""
Takes = Literal["tokens", "either", "text"]
"""The kinds of prompt that a server takes: token ids, for which the head needs its tokenizer; the
client's own text; or both."""
Parsing = Literal["tools", "reasoning"]
"""The parts of its answers that a server parses itself."""


class OfferedAdapter(Struct, frozen=True):
    """A LoRA adapter that the server has loaded: its name for clients, and its folder or id."""

    name: str
    root: str


class ModelOffer(Struct, frozen=True):
    """The model that one server offers. `root`: the folder or id of its weights. `names`: the names
    by which its clients know it. `paths`: the endpoints of the server, or all endpoints if the
    server does not tell. `parses`: the parts of its answers that the server parses itself, as a
    test has shown. `takes`: the kinds of prompts that it takes.
    """

    root: str
    names: tuple[str, ...]
    max_model_tokens: int
    paths: tuple[str, ...] = (COMPLETIONS, *MEDIA_PATHS)
    adapters: tuple[OfferedAdapter, ...] = ()
    parses: tuple[Parsing, ...] = ()
    takes: Takes = "tokens"

    @property
    def generates(self) -> bool:
        return COMPLETIONS in self.paths
