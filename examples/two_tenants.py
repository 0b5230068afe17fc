"""Two tenants ask a server the same: each has a cache of its own. Argument: the server's URL.

Write a file `keys` with a key, a tenant and a share per line, and start a server with it:

    sk-anna anna share=2
    sk-bert bert share=1

    moonpool serve --api-key-file keys
"""

import sys

import httpx

PROMPT = "The harbour master writes down every ship that passes the lighthouse. " * 8


def ask(tenant):
    """Returns how many tokens of the prompt came from the cache."""
    answer = httpx.post(
        f"{sys.argv[1]}/v1/completions",
        headers={"authorization": f"Bearer sk-{tenant}"},
        json={"prompt": PROMPT, "max_tokens": 4, "temperature": 0},
        timeout=60,
    )
    answer.raise_for_status()
    usage = answer.json()["usage"]
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


for tenant in ("anna", "anna", "bert", "bert"):
    print(f"{tenant}: {ask(tenant)} prompt tokens from the cache")
stranger = httpx.get(f"{sys.argv[1]}/v1/models", headers={"authorization": "Bearer sk-carl"})
print(f"a stranger gets status {stranger.status_code}")
