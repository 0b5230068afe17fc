"""What the site's search shows first: guides, then references, then evidence, then history.

In the search a word of a title counts a thousand times as much as one of the text, and a tag a
thousand times as much as that. The ranks below are closer together: a title that says the word
comes before a guide that only mentions it, but of two titles the guide's comes first.
"""

from __future__ import annotations

GUIDE, REFERENCE, EVIDENCE, HISTORY = 1e6, 3e4, 1e3, 1.0

REFERENCES = ("commands.md", "config.md", "http.md", "glossary.md", "SECURITY.md")
EVIDENCES = (
    "benchmarks.md", "benchmarks/", "reliability.md", "forecasts.md", "wrong-answers.md",
    "compatibility.md", "papers.md", "reading.md", "architecture.md", "dependencies.md",
    "CONTRIBUTING.md", "src/", "engine/", "lab/", "deploy/",
)  # fmt: skip
HISTORIES = ("decisions/", "CHANGELOG.md")

WORDS: dict[str, tuple[str, ...]] = {
    "install.md": (
        "install",
        "pip",
        "uv",
        "GPU",
        "CUDA",
        "Mac",
        "macOS",
        "Windows",
        "requirements",
    ),
    "run.md": ("Ollama", "laptop", "chat"),
    "models.md": ("Qwen", "Llama", "DeepSeek", "quantization", "GGUF"),
    "serving.md": ("quota", "rate limit", "batch", "structured output", "API key", "HTTPS", "TLS"),
    "operating.md": ("Docker", "container", "systemd", "upgrade", "backup", "standby"),
    "cluster.md": ("Kubernetes", "Helm", "k8s", "Slurm", "autoscaling"),
    "vllm.md": ("vLLM", "SGLang", "TensorRT-LLM", "llama-server"),
    "troubleshooting.md": ("error", "429", "422", "503", "401", "timeout", "timed out", "hangs"),
    "tuning.md": ("slow", "latency", "throughput", "TTFT", "TBT"),
    "watching.md": ("metrics", "Prometheus", "Grafana", "logs", "tracing"),
    "simulation.md": ("price", "cost", "plan", "capacity", "trace"),
    "python.md": ("notebook", "Jupyter", "Python"),
    "clients.md": ("OpenAI", "Anthropic", "LangChain", "Claude Code", "SDK"),
    "benchmarks.md": ("benchmarks", "performance"),
}
"""Words that people look for, by the page that answers; many pages use another word for it."""


def rank_of(path: str) -> float:
    """Returns the factor of a page of the site."""
    for rank, pages in ((HISTORY, HISTORIES), (EVIDENCE, EVIDENCES), (REFERENCE, REFERENCES)):
        if any(path == page or (page.endswith("/") and path.startswith(page)) for page in pages):
            return rank
    return GUIDE


def page_head(path: str) -> str:
    """Returns the head of a page for MkDocs: its rank, and words by which it is found."""
    lines = ["---", "search:", f"  boost: {rank_of(path)}"]
    if path in WORDS:
        lines += ["tags:", *(f'  - "{word}"' for word in WORDS[path])]
    if path == "index.md":
        lines += ["hide:", "  - navigation", "  - toc"]  # three doors need the width
    return "\n".join([*lines, "---", "", ""])
