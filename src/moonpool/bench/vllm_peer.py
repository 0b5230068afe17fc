"""Runs under the peer's Python, not ours: measures vLLM's CPU build on a checkpoint folder,
offline.

    PEER_PYTHON vllm_peer.py FOLDER '{"prefills": [512], "decodes": [...], ...}'

Prints one JSON object as its last line. Stands alone: it imports nothing of moonpool.
"""

import json
import os
import random
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def kv_gib(folder: str, kv_tokens: int) -> int:
    """Whole GiB that hold so many tokens, with some to spare."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    return int(kv_tokens * config["num_hidden_layers"] * per_layer * 1.25 / (1 << 30)) + 1


def main() -> None:
    folder, plan = sys.argv[1], json.loads(sys.argv[2])
    gib = kv_gib(folder, plan["kv_tokens"])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(gib))
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
    rng = random.Random(1)
    names = iter(range(1 << 30))

    def steps(lengths: list[list[int]]) -> list[tuple[float, int]]:
        """Seconds and tokens of each step of all sequences (prompt, answer) together."""
        for prompt, answer in lengths:
            sampling = SamplingParams(
                temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False
            )
            tokens = {"prompt_token_ids": [rng.randrange(8192) for _ in range(prompt)]}
            engine.add_request(str(next(names)), tokens, sampling)
        found = []
        while engine.has_unfinished_requests():
            began_s = time.perf_counter()
            outputs = engine.step()
            found.append((time.perf_counter() - began_s, len(outputs)))
        return found

    def prefill_s(tokens: int) -> float:
        return sum(seconds for seconds, _ in steps([[tokens, 1]]))

    def decode_s(lengths: list[list[int]]) -> float:
        """Median of the steps that all sequences had part in, but for the first: a prompt ended in
        it."""
        full = [seconds for seconds, tokens in steps(lengths) if tokens == len(lengths)]
        return statistics.median(full[1:])

    found: dict[str, Any] = {"version": vllm.__version__, "prefill": {}, "decode": {}}
    prefill_s(plan["chunk_tokens"])
    for tokens in plan["prefills"]:
        best_s = min(prefill_s(tokens) for _ in range(plan["repeats"]))
        found["prefill"][str(tokens)] = tokens / best_s
    for row in plan["decodes"]:
        rates = found["decode"].setdefault(str(row["context"]), {})
        rates[str(row["batch"])] = row["batch"] / decode_s(row["lengths"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
