"""Starts a vLLM with the connector and lets it answer: `python -m tests.live.vllm_layout.run MODEL
OPTIONS`, where the options are `LLM`'s as JSON. Prints the tokens of the answers."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    model, options = sys.argv[1], json.loads(sys.argv[2])
    prompts = [[(7 * i + n) % 199 + 20 for i in range(40 + 30 * n)] for n in range(3)]
    settings = {"max_model_len": 1024, "max_num_seqs": 8, "skip_tokenizer_init": True}
    llm = LLM(model, **(settings | options))
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    print("ANSWERS", json.dumps([list(a.outputs[0].token_ids) for a in answers]))


if __name__ == "__main__":
    main()
