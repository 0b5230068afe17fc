"""Tries lm eval harness against the server."""

import json
import os
import tempfile
from pathlib import Path

from commands import command
from probe import MODEL, TOKENIZER, URL, check, run

PLACE = Path(tempfile.mkdtemp())
LINES = [{"q": f"{n} + 1 =", "a": str(n + 1), "b": str(n + 2)} for n in range(1, 5)]
(PLACE / "sums.jsonl").write_text("\n".join(json.dumps(line) for line in LINES))
DATA = f"""dataset_path: json
dataset_kwargs:
  data_files: {{test: {PLACE}/sums.jsonl}}
test_split: test
doc_to_text: "{{{{q}}}}"
"""
CHOICE = """task: sums_choice
output_type: multiple_choice
doc_to_choice: "{{[a, b]}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
WRITE = """task: sums_write
output_type: generate_until
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""
(PLACE / "choice.yaml").write_text(CHOICE + DATA)
(PLACE / "write.yaml").write_text(WRITE + DATA)
os.environ |= {"OPENAI_API_KEY": "no-key", "HF_HOME": str(PLACE / "hf"), "HF_HUB_OFFLINE": "1"}


def evaluate(kind, path, task, *more):
    arguments = f"model={MODEL},base_url={URL}/v1/{path},num_concurrent=2,tokenizer={TOKENIZER}"
    found = command(
        *("lm_eval", "--model", kind, "--model_args", arguments, "--tasks", task),
        *("--include_path", str(PLACE), "--output_path", str(PLACE / "out"), *more),
    )
    check(task in found, found)


def completions():
    evaluate("local-completions", "completions", "sums_write")


def chat():
    evaluate("local-chat-completions", "chat/completions", "sums_write", "--apply_chat_template")


def logprobs():
    evaluate("local-completions", "completions", "sums_choice")


run(chat, logprobs, completions)
