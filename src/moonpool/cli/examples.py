"""Lines that `--help` and the manual pages show as examples, by command."""

from __future__ import annotations

MARK = "Example:"

EXAMPLES = {
    "run": (
        "moonpool run model.Q4_K_M.gguf",
        "moonpool run Qwen/Qwen3-0.6B --open",
        'git diff | moonpool run model.gguf --system "Review this change."',
    ),
    "serve": (
        "moonpool serve Qwen/Qwen3-0.6B --slo-ttft 2",
        "moonpool serve --vllm http://vllm-0:8000 --vllm http://vllm-1:8000",
    ),
    "head": ("moonpool head Qwen/Qwen3-0.6B --head-host 10.0.0.1 --host 10.0.0.1",),
    "worker": ("moonpool worker --role decode --head 10.0.0.1:8001",),
    "epp": (
        "moonpool epp --endpoints endpoints.yaml",
        "moonpool epp --dns vllm.llm.svc.cluster.local:8000 --slo-ttft 2",
    ),
    "demo": ("moonpool demo --users 6 --report demo.html",),
    "pool serve": ("moonpool pool serve --dram 8GiB --ssd 100GiB",),
    "pool drain": ("moonpool pool drain decode-0 --within 120",),
    "rewind": (
        "moonpool rewind http://127.0.0.1:8000 --request REQUEST_ID",
        "moonpool rewind http://127.0.0.1:8000 --trace requests.jsonl",
    ),
    "simulate": ("moonpool simulate --trace trace.jsonl --prefill 2 --decode 2",),
    "plan": ("moonpool plan --trace trace.jsonl --slo-ttft 2 --slo-tbt 0.1",),
    "report": ("moonpool report one.json two.json -o runs.html",),
    "trace generate": ("moonpool trace generate --requests 1000 -o trace.jsonl",),
    "trace info": ("moonpool trace info trace.jsonl",),
    "trial": ("moonpool trial http://127.0.0.1:8000",),
    "replay": ("moonpool replay --trace trace.jsonl --speed 2 http://127.0.0.1:8000",),
    "forecast": ("moonpool forecast --trace trace.jsonl http://127.0.0.1:8000",),
    "compare": ("moonpool compare simulated.json replayed.json",),
    "profile": ("moonpool profile Qwen/Qwen3-0.6B",),
    "config show": ("moonpool config show --config moonpool.toml --port 8080",),
}


def epilog(name: str) -> str | None:
    """Returns the text below the options in the help of this command, or None if it has no
    examples."""
    lines = EXAMPLES.get(name)
    if lines is None:
        return None
    return "\n".join(["\b", *(f"{MARK} {line}" for line in lines)])
