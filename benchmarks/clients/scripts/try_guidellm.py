"""Tries guidellm against the server."""

import json
import os
import tempfile
from pathlib import Path

from commands import command
from probe import MODEL, TOKENIZER, URL, check, run

PLACE = Path(tempfile.mkdtemp())
os.environ |= {"HF_HOME": str(PLACE), "HF_HUB_OFFLINE": "1"}


def load():
    report = PLACE / "report.json"
    command(
        *("guidellm", "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={URL},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=8"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
        *("--output", f"kind=json,path={report}"),
        cwd=PLACE,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    check(benchmark["metrics"]["request_totals"]["successful"] == 8, benchmark["metrics"])


run(load)
