"""Runs a vLLM with the pool: `python -m tests.live.vllm_pool.run MODEL SETTINGS SALT OPTIONS`.
Prints the tokens of vLLM's answers and the number of prompt tokens that came from the pool, and
then waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

CONNECTOR = {
    "kv_connector": "MoonpoolConnector",
    "kv_connector_module_path": "moonpool.vllm_connector",
    "kv_role": "kv_both",
}

OPTIONS = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "num_gpu_blocks_override": 120,
    "block_size": 32,
    "disable_log_stats": False,
}


def main() -> None:
    from vllm import LLM, SamplingParams

    model, settings, salt, options = sys.argv[1:5]
    config = CONNECTOR | {"kv_connector_extra_config": json.loads(settings)}
    prompts = [[(7 * i + 11 * n) % 199 + 20 for i in range(200 + 40 * n)] for n in range(4)]
    llm = LLM(model, kv_transfer_config=config, **(OPTIONS | json.loads(options)))
    time.sleep(3.0)  # gives vLLM's processes time to join the pool
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    answers = []
    for prompt in prompts:  # one prompt at a time, because batches give other last bits
        one = {"prompt_token_ids": prompt, "cache_salt": salt}
        (answer,) = llm.generate([one], asked, use_tqdm=False)
        answers.append(list(answer.outputs[0].token_ids))
    hits = [m.value for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits"]
    # Another request is sent, because the last stores end only when vLLM runs a step.
    llm.generate([{"prompt_token_ids": [5] * 8}], asked, use_tqdm=False)
    time.sleep(1.0)
    print("FOUND", json.dumps({"answers": answers, "hits": sum(hits)}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
