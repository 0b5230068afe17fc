"""Runs under the peer's Python, not ours: measures vLLM's CPU build on a checkpoint folder,
offline.

    PEER_PYTHON vllm_peer.py FOLDER '{"prefill": [512, 2048], "decode": [1, 8, 32], ...}'

Prints one JSON object as its last line. Stands alone: it imports nothing of moonpool.
"""

import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    folder, plan = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype="bfloat16",
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        max_num_batched_tokens=plan["chunk_tokens"],
        max_model_len=plan["max_model_tokens"],
        max_num_seqs=64,
        skip_tokenizer_init=True,
        enforce_eager=plan["eager"],
    )
    rng = random.Random(1)

    def seconds(batch: int, prompt_tokens: int, new_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [rng.randrange(8192) for _ in range(prompt_tokens)]}
            for _ in range(batch)
        ]
        sampling = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        began_s = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began_s

    def best(batch: int, prompt_tokens: int, new_tokens: int) -> float:
        seconds(batch, prompt_tokens, new_tokens)
        return min(seconds(batch, prompt_tokens, new_tokens) for _ in range(plan["repeats"]))

    found: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}}
    for tokens in plan["prefill"]:
        found["prefill"][str(tokens)] = tokens / best(1, tokens, 1)
    for batch in plan["decode"]:
        steps = plan["decode_tokens"]
        spent_s = best(batch, plan["context"], 1 + steps) - best(batch, plan["context"], 1)
        found["decode"][str(batch)] = batch * steps / spent_s
    print(json.dumps(found))


if __name__ == "__main__":
    main()
