"""Runs under the peer's Python, not ours: measures llama.cpp on a checkpoint folder.

    PEER_PYTHON llama_peer.py FOLDER '{"prefills": [512], "decodes": [...], ...}'

Needs the packages llama-cpp-python (built for this machine), gguf and numpy. Prints one JSON object
as its last line. Stands alone: it imports nothing of moonpool.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def to_gguf(folder: str, path: str) -> None:
    """Writes the same weights in bfloat16, without a tokeniser."""
    import gguf
    import numpy as np

    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with open(os.path.join(folder, "model.safetensors"), "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            data = np.frombuffer(file.read(end - begin), np.uint16).reshape(entry["shape"])
            for part, count in heads.items():
                if part in name:  # llama.cpp rotates neighbours, checkpoints halves
                    halves = data.reshape(count, 2, -1, data.shape[1])
                    data = halves.swapaxes(1, 2).reshape(data.shape)
            if data.ndim == 1:
                writer.add_tensor(gguf_name(name), (data.astype(np.uint32) << 16).view(np.float32))
            else:
                raw = np.ascontiguousarray(data).view(np.uint8)
                writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    if name in OTHERS:
        return OTHERS[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


class LlamaContext:
    """One llama.cpp context of `streams` sequences with KVCache of their own."""

    def __init__(self, model: object, streams: int, tokens: int, chunk_tokens: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = streams * tokens
        params.n_batch = params.n_ubatch = chunk_tokens
        params.n_seq_max = streams
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 1
        params.kv_unified = False
        self.handle = llama_cpp.llama_init_from_model(model, params)
        if not self.handle:
            raise SystemExit("llama.cpp made no context")
        self.batch = llama_cpp.llama_batch_init(chunk_tokens, 0, 1)
        self.rng = random.Random(1)

    def run(self, rows: list[tuple[int, int]], wanted: int) -> None:
        """One step of (sequence, position) rows; the last `wanted` draw the likeliest token."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (sequence, position) in enumerate(rows):
            batch.token[i] = self.rng.randrange(8192)
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i >= len(rows) - wanted
        status = self.api.llama_decode(self.handle, batch)
        if status:
            raise SystemExit(f"llama_decode gave {status}")
        for i in range(len(rows) - wanted, len(rows)):
            np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.handle, i), (8192,)).argmax()

    def prefill(self, sequence: int, tokens: int, chunk_tokens: int) -> float:
        began_s = time.perf_counter()
        for start in range(0, tokens, chunk_tokens):
            end = min(start + chunk_tokens, tokens)
            self.run([(sequence, at) for at in range(start, end)], int(end == tokens))
        return time.perf_counter() - began_s

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.handle)


def main() -> None:
    folder, plan = sys.argv[1], json.loads(sys.argv[2])
    import llama_cpp

    llama_cpp.llama_log_set(llama_cpp.llama_log_callback(lambda *_: None), None)
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as into:
        path = os.path.join(into, "model.gguf")
        to_gguf(folder, path)
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise SystemExit("llama.cpp does not load the weights")
    chunk = plan["chunk_tokens"]
    found: dict[str, Any] = {"version": llama_cpp.__version__, "prefill": {}, "decode": {}}
    for tokens in [chunk, *plan["prefills"]]:  # the first chunk does not count
        context = LlamaContext(model, 1, tokens + 1, chunk)
        best_s = float("inf")
        for _ in range(plan["repeats"]):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context.handle), True)
            best_s = min(best_s, context.prefill(0, tokens, chunk))
        found["prefill"][str(tokens)] = tokens / best_s
        context.close()
    found["prefill"] = {str(tokens): found["prefill"][str(tokens)] for tokens in plan["prefills"]}
    for row in plan["decodes"]:
        batch, length, steps = row["batch"], row["context"], plan["steps"]
        context = LlamaContext(model, batch, length + steps + 1, chunk)
        memory = llama_cpp.llama_get_memory(context.handle)
        context.prefill(0, length, chunk)
        for sequence in range(1, batch):  # copies: each reads memory of its own
            llama_cpp.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        times = []
        for step in range(steps):
            began_s = time.perf_counter()
            context.run([(i, length + step) for i in range(batch)], batch)
            times.append(time.perf_counter() - began_s)
        rates = found["decode"].setdefault(str(length), {})
        rates[str(batch)] = batch / statistics.median(times[1:])
        context.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
