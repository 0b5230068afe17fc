"""Runs under the peer's Python, not ours: measures OpenVINO GenAI on a checkpoint folder.

    PEER_PYTHON openvino_peer.py FOLDER '{"prefills": [512], "decodes": [...], ...}'

Needs the packages openvino-genai and optimum-intel, which converts the checkpoint. Prints one JSON
object as its last line. Imports nothing of moonpool but `peer_rows`, which lies beside it.
"""

import json
import os
import sys
import tempfile
import time

from peer_rows import RandomPrompts, print_rows  # type: ignore[import-not-found]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OPENVINO_TELEMETRY_DISABLE", "1")


def converted(folder: str, into: str) -> None:
    """Converts the model with its weights unchanged in bfloat16."""
    import torch
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, load_in_8bit=False, torch_dtype=torch.bfloat16
    )
    model.save_pretrained(into)


def precision() -> str:
    """OpenVINO computes in bfloat16 on AVX-512 only, and else insists on a float32 KVCache."""
    with open("/proc/cpuinfo") as info:
        return "bf16" if "avx512" in info.read() else "f32"


def main() -> None:
    folder, plan = sys.argv[1], json.loads(sys.argv[2])
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = plan["chunk_tokens"]
    scheduler.cache_size = plan["kv_gib"]
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_seqs = 64
    options = {
        "INFERENCE_NUM_THREADS": 1,
        "INFERENCE_PRECISION_HINT": precision(),
        "KV_CACHE_PRECISION": precision(),
    }
    with tempfile.TemporaryDirectory() as into:
        converted(folder, into)
        pipe = openvino_genai.ContinuousBatchingPipeline(into, scheduler, "CPU", options)
    prompts = RandomPrompts()
    names = iter(range(1 << 30))

    def steps(lengths: list[tuple[int, int]]) -> list[tuple[float, int]]:
        """Seconds and tokens of each step of all sequences (prompt, answer) together."""
        handles = []
        for prompt, answer in lengths:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.do_sample = answer, False
            config.ignore_eos = True
            config.set_eos_token_id(0)  # an end token must be set
            ids = np.array([prompts.draw(prompt)], dtype=np.int64)
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

    print_rows(openvino_genai.__version__, plan, steps)


if __name__ == "__main__":
    main()
