"""Lets the model runner of a vLLM worker compute prompts in blocks that we choose.

Each rank of a vLLM calls the same steps at the same time, as with steps of vLLM's scheduler. Must
not run while vLLM has requests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Logprobs = dict[int, float]
"""Logprobs of the likeliest next tokens."""

MOST_LOGPROBS = 20


@dataclass(slots=True)
class HandRequest:
    """A prompt, and for each group of KVCache the blocks that its tokens are in."""

    name: str
    tokens: Sequence[int]
    block_ids: Sequence[Sequence[int]]
    num_computed: int = 0
    known: bool = field(default=False, init=False)
    """Whether the runner has had this request in a step."""


def find_worker() -> Any:
    """Returns vLLM's worker from the call stack of a method of this connector, or None without
    one."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if all(hasattr(found, name) for name in ("model_runner", "execute_model", "sample_tokens")):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def attention_backends(worker: Any) -> dict[str, str]:
    """Returns, by layer, the class of attention and all other facts that determine in which order
    its kernels store bytes within a block. `CacheLayout.fingerprint` includes these. Empty where
    this vLLM does not show it."""
    runner = worker.model_runner
    layers = getattr(worker.vllm_config.compilation_config, "static_forward_context", {})
    found = {}
    for group in (group for groups in getattr(runner, "attn_groups", ()) for group in groups):
        for name in group.layer_names:
            words = [f"{group.backend.__module__}.{group.backend.__qualname__}"]
            words.append(f"kernel block {getattr(group, 'kernel_block_size', None)}")
            # Instructions of the CPU: kernels for AMX have keys in another order.
            words.append(f"isa {getattr(layers.get(name), 'isa', None)}")
            found[name] = ", ".join(words)
    return found


class WorkerSteps:
    """Steps of one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._under_way: list[HandRequest] = []

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self._worker.vllm_config.model_config.get_vocab_size())

    @property
    def most_tokens(self) -> int:
        """The most tokens of one step."""
        return int(self._worker.vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def most_prompt_tokens(self) -> int:
        """The most tokens of a prompt that leave one place for the next token."""
        return int(self._worker.vllm_config.model_config.max_model_len) - 1

    def why_unfit(self) -> str:
        """Why no prompts can be computed here; empty if they can."""
        config = self._worker.vllm_config
        if config.model_config.runner_type != "generate":
            return "the model has no next token to prove a layout with"
        if config.scheduler_config.max_num_seqs < 2:
            return "a proof needs two requests in a step, vLLM takes one (max_num_seqs)"
        parallel = config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                return f"a prompt's blocks are divided among ranks by {name}: not supported"
        return ""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this context the runner calls no connector, and afterwards its state is as before: the
        context's requests end, and random numbers continue where they were."""
        import torch

        device = self._worker.model_runner.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), _without_connector(self._worker):
            try:
                yield
            finally:
                self._end()

    def step(self, chunks: Sequence[tuple[HandRequest, int]]) -> dict[str, Logprobs]:
        """Computes the next tokens of some requests together, as many of each as named.

        Returns the log-probabilities of the tokens that follow, for each request whose prompt is
        computed to its end; nothing on a rank without the last layer.
        """
        output = self._plan(chunks)
        result = self._perform(output)
        for request, count in chunks:
            request.num_computed += count
        if result is None or result.logprobs is None:
            return {}
        rows = {name: i for i, name in enumerate(result.req_ids)}
        return {
            request.name: _likeliest(result.logprobs, rows[request.name])
            for request, _ in chunks
            if request.num_computed == len(request.tokens)
        }

    def finish(self) -> None:
        """Ends all requests."""
        if not self._under_way:
            return
        output = _empty_output()
        output.finished_req_ids = {request.name for request in self._under_way}
        self._under_way.clear()
        self._worker.execute_model(output)

    def _plan(self, chunks: Sequence[tuple[HandRequest, int]]) -> Any:
        output = _empty_output()
        for request, count in chunks:
            output.num_scheduled_tokens[request.name] = count
            if request.known:
                self._continue(output.scheduled_cached_reqs, request)
            else:
                output.scheduled_new_reqs.append(_new_request(request))
                request.known = True
                self._under_way.append(request)
        output.total_num_scheduled_tokens = sum(count for _, count in chunks)
        return output

    @staticmethod
    def _continue(known: Any, request: HandRequest) -> None:
        known.req_ids.append(request.name)
        known.new_block_ids.append(None)
        known.num_computed_tokens.append(request.num_computed)
        known.num_output_tokens.append(0)

    def _perform(self, output: Any) -> Any:
        result = self._worker.execute_model(output)
        if result is None:
            result = self._worker.sample_tokens(None)
        if hasattr(result, "get_output"):  # the result comes while the next step is being planned
            result = result.get_output()
        return result

    def _end(self) -> None:
        runner = self._worker.model_runner
        if getattr(runner, "execute_model_state", None) is not None:
            # a step failed between its two halves, so its state is reset
            runner.execute_model_state = None
        self.finish()


def _empty_output() -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    return SchedulerOutput.make_empty()


def _new_request(request: HandRequest) -> Any:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    return NewRequestData(
        req_id=request.name,
        prompt_token_ids=list(request.tokens),
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, logprobs=MOST_LOGPROBS),
        pooling_params=None,
        block_ids=tuple(list(ids) for ids in request.block_ids),
        num_computed_tokens=request.num_computed,
        lora_request=None,
        prefill_token_ids=list(request.tokens),
    )


def _likeliest(found: Any, row: int) -> Logprobs:
    if found.cu_num_generated_tokens is not None:
        row = found.cu_num_generated_tokens[row]
    pairs = zip(found.logprob_token_ids[row].tolist(), found.logprobs[row].tolist(), strict=True)
    return dict(pairs)


@contextmanager
def _without_connector(worker: Any) -> Iterator[None]:
    """Runs without the connector, as vLLM does for its own dummy steps."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    kept = kv_transfer_state._KV_CONNECTOR_AGENT
    own: Any = getattr(worker.model_runner, "kv_connector", None)
    if own is not None:
        own.set_disabled(True)
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        if own is not None:
            own.set_disabled(False)
        kv_transfer_state._KV_CONNECTOR_AGENT = kept
