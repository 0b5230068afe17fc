"""What a server offers to the head that it is to work for."""

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
"""What a server takes as a prompt: token ids, for which the head needs its tokenizer; or the
client's own text; or either."""
Parsing = Literal["tools", "reasoning"]
"""What a server itself finds in its answers."""


class OfferedAdapter(Struct, frozen=True):
    """A LoRA adapter that the server has loaded: its name for clients, and its folder or id."""

    name: str
    root: str


class ModelOffer(Struct, frozen=True):
    """The model of one server. `root`: the folder or id of its weights. `names`: those by which its
    clients know it. `paths`: the endpoints of the lists above that it has; all of them if it does
    not tell. `parses`: what it has shown to find in its answers. `takes`: of what kind prompts are.
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
