"""Runs under the peer's Python, not ours: measures OpenVINO GenAI on a checkpoint folder.

    PEER_PYTHON openvino_peer.py FOLDER '{"prefills": [512], "decodes": [...], ...}'

Needs the packages openvino-genai and optimum-intel, which converts the checkpoint. Prints one JSON
object as its last line. Stands alone: it imports nothing of moonpool.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OPENVINO_TELEMETRY_DISABLE", "1")


def converted(folder: str, into: str) -> None:
    """The same weights, in bfloat16 as they are."""
    import torch
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, load_in_8bit=False, torch_dtype=torch.bfloat16
    )
    model.save_pretrained(into)


def kv_gib(folder: str, kv_tokens: int) -> int:
    """Whole GiB that hold so many tokens, with some to spare."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    return int(kv_tokens * config["num_hidden_layers"] * per_layer * 1.25 / (1 << 30)) + 1


def main() -> None:
    folder, plan = sys.argv[1], json.loads(sys.argv[2])
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = plan["chunk_tokens"]
    scheduler.cache_size = kv_gib(folder, plan["kv_tokens"])
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_seqs = 64
    options = {
        "INFERENCE_NUM_THREADS": 1,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
    }
    with tempfile.TemporaryDirectory() as into:
        converted(folder, into)
        pipe = openvino_genai.ContinuousBatchingPipeline(into, scheduler, "CPU", options)
    rng = random.Random(1)
    names = iter(range(1 << 30))

    def steps(lengths: list[list[int]]) -> list[tuple[float, int]]:
        """Seconds and tokens of each step of all sequences (prompt, answer) together."""
        handles = []
        for prompt, answer in lengths:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.do_sample = answer, False
            config.ignore_eos = True
            config.set_eos_token_id(0)  # there must be one
            ids = np.array([[rng.randrange(8192) for _ in range(prompt)]], dtype=np.int64)
            handles.append(pipe.add_request(next(names), openvino.Tensor(ids), config))
        found = []
        while pipe.has_non_finished_requests():
            began_s = time.perf_counter()
            pipe.step()
            seconds = time.perf_counter() - began_s
            ready = [handle for handle in handles if handle.can_read()]
            for handle in ready:
                handle.read()
            found.append((seconds, len(ready)))
        return found

    def prefill_s(tokens: int) -> float:
        return sum(seconds for seconds, _ in steps([[tokens, 1]]))

    def decode_s(lengths: list[list[int]]) -> float:
        """Median of the steps that all sequences had part in, but for the first: a prompt ended in
        it."""
        full = [seconds for seconds, tokens in steps(lengths) if tokens == len(lengths)]
        return statistics.median(full[1:])

    found: dict[str, Any] = {"version": openvino_genai.__version__, "prefill": {}, "decode": {}}
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
