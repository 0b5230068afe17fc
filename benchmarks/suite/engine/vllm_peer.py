"""Runs under the peer's Python, not ours: measures vLLM's CPU build on a checkpoint folder,
offline.

    PEER_PYTHON vllm_peer.py FOLDER '{"prefills": [512], "decodes": [...], ...}'

Prints one JSON object as its last line. Imports nothing of moonpool but `peer_rows`, which lies
beside it.
"""

import json
import os
import sys
import time

from peer_rows import RandomPrompts, print_rows  # type: ignore[import-not-found]

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    folder, plan = sys.argv[1], json.loads(sys.argv[2])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(plan["kv_gib"]))
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        dtype="bfloat16",
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        max_num_batched_tokens=plan["chunk_tokens"],
        max_model_len=plan["longest_tokens"],
        max_num_seqs=64,
        skip_tokenizer_init=True,
        enforce_eager=plan["eager"],
    ).llm_engine
    prompts = RandomPrompts()
    names = iter(range(1 << 30))

    def steps(lengths: list[tuple[int, int]]) -> list[tuple[float, int]]:
        """Runs all sequences (tokens of prompt, of answer) in one batch. Returns seconds and tokens
        of each step."""
        for prompt, answer in lengths:
            sampling = SamplingParams(
                temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False
            )
            tokens = {"prompt_token_ids": prompts.draw(prompt)}
            engine.add_request(str(next(names)), tokens, sampling)
        found = []
        while engine.has_unfinished_requests():
            began_s = time.perf_counter()
            outputs = engine.step()
            found.append((time.perf_counter() - began_s, len(outputs)))
        return found

    print_rows(vllm.__version__, plan, steps)


if __name__ == "__main__":
    main()
