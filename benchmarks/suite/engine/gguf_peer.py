"""Runs under the peer's Python, not ours: llama.cpp on one GGUF file, a command a line.

    PEER_PYTHON gguf_peer.py FILE '{"context": 256, "batches": [1, 8], "prefill": 512, "steps": 8}'

Needs the packages llama-cpp-python (built for this machine) and numpy. Reads JSON objects from
standard input and answers each with one on standard output:

    {"do": "time", "job": "prefill_512", "threads": 2}  ->  {"seconds": s}
    {"do": "perplexity", "ids": [...], "kv": "float32"} ->  {"perplexity": p}
    {"do": "tokenize", "text": "..."}                   ->  {"ids": [...]}

Stands alone: it imports nothing of moonpool.
"""

import json
import math
import sys
import time
from typing import Any

KV_KINDS = {"float32": 0, "float16": 1, "bfloat16": 30}
UBATCH = 512


class LlamaModel:
    """One loaded file, and the contexts in which its steps are timed."""

    def __init__(self, path: str, plan: dict[str, Any]) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        self.plan = plan
        self.log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.log, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False
        self.handle = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            raise SystemExit("llama.cpp does not load the file")
        self.vocab = llama_cpp.llama_model_get_vocab(self.handle)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.contexts: dict[str, Any] = {}

    def context(self, streams: int, tokens: int, rows: int, kv: str) -> Any:
        api = self.api
        params = api.llama_context_default_params()
        params.n_ctx = streams * tokens
        params.n_batch, params.n_ubatch = rows, min(rows, UBATCH)
        params.n_seq_max = streams
        params.flash_attn_type = 1
        params.kv_unified = False
        params.type_k = params.type_v = KV_KINDS[kv]
        handle = api.llama_init_from_model(self.handle, params)
        if not handle:
            raise SystemExit("llama.cpp made no context")
        return handle

    def decode(self, context: Any, rows: list[tuple[int, int, int]], wanted: range) -> None:
        """One step of (token, sequence, position) rows; logits of the `wanted` ones."""
        batch = self.api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, sequence, position) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i in wanted
        status = self.api.llama_decode(context, batch)
        self.api.llama_batch_free(batch)
        if status:
            raise SystemExit(f"llama_decode gave {status}")

    def logits(self, context: Any, row: int) -> Any:
        import numpy as np

        found = self.api.llama_get_logits_ith(context, row)
        return np.ctypeslib.as_array(found, (self.vocab_size,))

    def time(self, job: str, threads: int) -> float:
        kind, _, number = job.rpartition("_")
        prefill = kind == "prefill"
        context = self._ready(job, 1 if prefill else int(number))
        self.api.llama_set_n_threads(context, threads, threads)
        return self._prefill_s(context) if prefill else self._decode_s(context, int(number))

    def _ready(self, job: str, streams: int) -> Any:
        if job not in self.contexts:
            longest = max(self.plan["prefill"], self.plan["context"] + self.plan["steps"])
            context = self.context(streams, longest, self.plan["prefill"], "float16")
            self.contexts[job] = context
            for sequence in range(streams):
                rows = [(at % 256, sequence, at) for at in range(self.plan["context"])]
                self.decode(context, rows, range(0))
        return self.contexts[job]

    def _prefill_s(self, context: Any) -> float:
        self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
        last = self.plan["prefill"] - 1
        rows = [(at % 256, 0, at) for at in range(last + 1)]
        began_s = time.perf_counter()
        self.decode(context, rows, range(last, last + 1))
        self.logits(context, last).argmax()
        return time.perf_counter() - began_s

    def _decode_s(self, context: Any, streams: int) -> float:
        """Seconds of one step; each is at the next position, as llama.cpp wants it."""
        start, steps = self.plan["context"], self.plan["steps"]
        memory = self.api.llama_get_memory(context)
        began_s = time.perf_counter()
        for step in range(steps):
            rows = [((1 + 17 * row) % 256, row, start + step) for row in range(streams)]
            self.decode(context, rows, range(streams))
            for row in range(streams):
                self.logits(context, row).argmax()
        seconds: float = (time.perf_counter() - began_s) / steps
        for sequence in range(streams):
            self.api.llama_memory_seq_rm(memory, sequence, start, -1)
        return seconds

    def perplexity(self, ids: list[int], kv: str) -> float:
        import numpy as np

        context = self.context(1, len(ids), len(ids), kv)
        rows = [(token, 0, at) for at, token in enumerate(ids)]
        self.decode(context, rows, range(len(ids)))
        total = 0.0
        for at, token in enumerate(ids[1:]):
            row = self.logits(context, at).astype(np.float64)
            row -= row.max()
            total += math.log(np.exp(row).sum()) - row[token]
        self.api.llama_free(context)
        return math.exp(float(total) / (len(ids) - 1))

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        into = (self.api.llama_token * (len(data) + 8))()
        count = self.api.llama_tokenize(self.vocab, data, len(data), into, len(into), True, False)
        return list(into[: max(count, 0)])


def main() -> None:
    model = LlamaModel(sys.argv[1], json.loads(sys.argv[2]))
    answer({"version": model.api.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "time":
            answer({"seconds": model.time(asked["job"], asked["threads"])})
        elif asked["do"] == "tokenize":
            answer({"ids": model.tokenize(asked["text"])})
        else:
            answer({"perplexity": model.perplexity(asked["ids"], asked["kv"])})


def answer(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
