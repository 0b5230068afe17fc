"""A process that reads bodies is forked from the head before its loop runs. The process is like a
new interpreter, and has none of the head's state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from moonpool_lab.demo.local_server import is_alive
from tests.unit.engine.test_tokenizer_huggingface import byte_level, write_folder

HEAD = """
import asyncio, json, os, signal, sys
import uvloop
import moonpool.head.cluster
from moonpool.api.body_pool import body_start
from moonpool.api.body_process import BodyWork
from moonpool.api.body_reading.client import BodyClient, NotReadError, fork_reader
from moonpool.api.serving_backend import ApiOptions, ModelCard

tokenizer, kept = sys.argv[1], open(sys.argv[2])
os.set_inheritable(kept.fileno(), True)
forked = fork_reader()
pid = forked.helper.get_pid()
said = {"pid": pid}

def of(what):
    with open(f"/proc/{pid}/{what}") as file:
        return file.read()

async def main():
    client = BodyClient(body_start(ApiOptions(tokenizer=tokenizer), 300), forked)
    said["trouble"] = await client.begin()
    said["same"] = client.pid == pid
    if not said["trouble"]:
        said["line"] = of("cmdline").strip("\\0")
        said["links"] = [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
        said["parent"] = int(of("stat").rpartition(")")[2].split()[1]) == os.getpid()
        work = BodyWork(kind="completion", raw=b'{"prompt": "hi"}', party="", limit_s=60)
        sizes = {"created_s": 0, "max_model_tokens": 100, "vocab_size": 300}
        card = ModelCard(model_id="m", eos_token_ids=(), **sizes)
        result = await client.read(work, card)
        said["error"] = result.error and result.error.message
        said["tokens"] = len(result.prompts[0]) // 4
        os.kill(pid, signal.SIGKILL)
        try:
            while True:
                await client.read(work, card)
        except NotReadError:
            said["ended"] = client.has_ended
        except Exception as error:
            said["ended"] = type(error).__name__
    client.end()

uvloop.run(main())
print(json.dumps(said))
"""


def told(tokenizer: Path, kept: Path) -> dict[str, Any]:
    line = [sys.executable, "-c", HEAD, str(tokenizer), str(kept)]
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # with more than one, numpy starts threads
    done = subprocess.run(line, env=alone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["same"] and not is_alive(found["pid"])
    return found


def test_it_reads_bodies_and_has_nothing_of_the_head(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level())
    kept = tmp_path / "of the head"
    kept.touch()
    found = told(tmp_path, kept)
    assert (found["trouble"], found["error"], found["tokens"]) == ("", None, 2)
    assert found["line"].endswith("-m moonpool.api.body_process") and found["parent"]
    assert not any("of the head" in link for link in found["links"])
    assert len(found["links"]) <= 5
    assert found["ended"] in (True, "BodyProcessEndedError")


def test_what_it_cannot_load_is_told(tmp_path: Path) -> None:
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA//8="}
    path = write_folder(tmp_path, byte_level()) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": charsmap}))
    assert "(SIGABRT)" in told(tmp_path, path)["trouble"]
