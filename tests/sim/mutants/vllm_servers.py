"""Plants bugs in instances whose engine is a vLLM server."""

from __future__ import annotations

from typing import Any

import msgspec

from moonpool.vllm import dialect
from moonpool.vllm.actions import CancelRequest, EngineOutput
from moonpool.vllm.block_names import ExternalBlocks
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.known_cache import KnownCache
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method


@plant("vLLM prompts of all tenants have no salt", dialect, "salt_of")
def _no_salt(original: Method) -> Method:
    return lambda *args: None


@plant("a decode vLLM's first token is not compared", VllmInstance, "_on_output")
def _any_first_token(original: Method) -> Method:
    def defective(self: VllmInstance, output: EngineOutput, now: float) -> None:
        request = self._attempts.get(output.attempt_id)
        if request is not None and output.tokens and not request.generated:
            request.first_token = request.first_token and output.tokens[0]
        original(self, output, now)

    return defective


@plant("equal blocks in a vLLM count as one", ExternalBlocks, "_forget")
def _one_copy(original: Method) -> Method:
    def defective(self: ExternalBlocks, name: Any, medium: str) -> None:
        if (name, medium) in self._copies:
            self._copies[name, medium] = 1
        original(self, name, medium)

    return defective


@plant("an answer that goes on in a vLLM has its full length again", dialect, "completion_body")
def _full_length(original: Method) -> Method:
    def defective(submit: Any, *rest: Any) -> bytes:
        body = msgspec.json.decode(original(submit, *rest))
        if not submit.hands_over:
            body["max_tokens"] = submit.attempt.sampling.max_tokens
        return msgspec.json.encode(body)

    return defective


@plant("a gap in a vLLM's events voids nothing", KnownCache, "hear")
def _no_gap(original: Method) -> Method:
    def defective(self: KnownCache, events: Any, lost: bool, now: float) -> None:
        original(self, events, False, now)

    return defective


@plant("a vLLM goes on with a cancelled attempt", VllmInstance, "_on_abort")
def _goes_on(original: Method) -> Method:
    def defective(self: VllmInstance, *args: Any) -> None:
        original(self, *args)
        self._actions[:] = [a for a in self._actions if not isinstance(a, CancelRequest)]

    return defective
