"""`moonpool bench engine|quantization|formats|sarathi|...`: the engine of one instance."""

from __future__ import annotations

from pathlib import Path

import click

from moonpool.cli.options import COUNT, json_option
from moonpool.cli.output import check_folders, fail, origin, show_figures, write_json


@click.command()
@click.option(
    "--model",
    default="random:m150",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option("--peer-python", help="Compare with vLLM's CPU build of this Python installation.")
@click.option(
    "--openvino-python",
    help="Compare with openvino-genai of this Python, which also has optimum-intel.",
)
@click.option(
    "--llama-python", help="Compare with llama-cpp-python of this Python, which also has gguf."
)
@click.option(
    "--peer-eager", is_flag=True, help="Keep vLLM from compiling: it starts sooner and runs slower."
)
@click.option(
    "--prompt",
    "prefills",
    multiple=True,
    type=COUNT,
    default=(512, 2048, 8192),
    show_default=True,
    help="Tokens of a prompt; repeat for more.",
)
@click.option(
    "--batch",
    "batches",
    multiple=True,
    type=COUNT,
    default=(1, 8, 32),
    show_default=True,
    help="Number of sequences of a decode step; repeat for more.",
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=COUNT,
    default=(512, 4096),
    show_default=True,
    help="Context tokens of each decode; all are computed, and 32 of 4,096 take minutes.",
)
@click.option(
    "--chunk-tokens",
    type=COUNT,
    default=512,
    show_default=True,
    help="Tokens of a prefill chunk of all engines.",
)
@click.option(
    "--repeats",
    type=COUNT,
    default=3,
    show_default=True,
    help="Measure each prefill this often; the best counts.",
)
@json_option
def engine(
    model: str,
    peer_python: str | None,
    openvino_python: str | None,
    llama_python: str | None,
    peer_eager: bool,
    prefills: tuple[int, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    chunk_tokens: int,
    repeats: int,
    json_file: str | None,
) -> None:
    """Measure prefill and decode, against the machine's limits, vLLM, OpenVINO and llama.cpp.

    The limits are GEMM rate and memory bandwidth. All engines use one thread.
    """
    from benchmarks.suite.engine.engine import PeerError, bench_engine
    from benchmarks.suite.engine.engine_rows import EngineBenchRows
    from moonpool.engine.spec import ModelError

    rows = EngineBenchRows(prefills, batches, contexts, chunk_tokens)
    pythons = {"vllm": peer_python, "openvino": openvino_python, "llama.cpp": llama_python}
    peers = {name: python for name, python in pythons.items() if python is not None}
    try:
        found = bench_engine(model, rows, peers, peer_eager, repeats, click.echo)
    except (PeerError, ModelError) as error:
        fail(str(error))
    show_figures(found, json_file)


@click.command()
@click.option(
    "--model",
    default="moonpool/induction",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option("--prompts", type=COUNT, default=32, show_default=True, help="Number of prompts.")
@click.option(
    "--answer-tokens", type=COUNT, default=64, show_default=True, help="Tokens of each answer."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random choices.")
@json_option
def quantization(
    model: str, prompts: int, answer_tokens: int, seed: int, json_file: str | None
) -> None:
    """Compare weights of 8 bits with bfloat16: KL, perplexity, greedy answers and tokens/s.

    Both use one thread.
    """
    from benchmarks.suite.engine.quantization import bench_quantization
    from moonpool.engine.spec import ModelError

    try:
        found = bench_quantization(model, prompts, answer_tokens, seed, click.echo)
    except ModelError as error:
        fail(str(error))
    show_figures(found, json_file)


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="GGUF file.")
@click.option(
    "--llama-python", help="Compare with llama-cpp-python of this Python, which also has numpy."
)
@click.option(
    "--rounds",
    type=COUNT,
    default=7,
    show_default=True,
    help="Rounds in which the engines run in turns, after one that does not count.",
)
@click.option(
    "--threads",
    multiple=True,
    type=COUNT,
    default=(1, 2),
    show_default=True,
    help="Threads of each engine; repeat for more.",
)
@click.option("--tokens", type=COUNT, default=1024, show_default=True, help="Tokens of the text.")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text of the perplexity; default: docs/architecture.md.",
)
@click.option(
    "--converted",
    is_flag=True,
    help="Compare the model in other formats instead; MODEL may also be a Hugging Face folder.",
)
@json_option
def formats(
    model: str,
    llama_python: str | None,
    rounds: int,
    threads: tuple[int, ...],
    tokens: int,
    text: Path | None,
    converted: bool,
    json_file: str | None,
) -> None:
    """Measure a GGUF file by moonpool and llama.cpp: time, read bandwidth and perplexity.

    With --converted: quantized weights beside float32 in quality and bfloat16 in time.
    """
    from benchmarks.suite.engine.formats import TEXT, bench_formats
    from benchmarks.suite.engine.gguf_engines import (
        GgufBenchPlan,
        GgufPeerError,
        bench_gguf_engines,
    )
    from moonpool.engine.spec import ModelError

    check_folders(json_file)
    source = text or TEXT
    try:
        if converted:
            found = bench_formats(model, tokens, source, click.echo)
        else:
            plan = GgufBenchPlan(rounds, threads)
            found = bench_gguf_engines(model, tokens, source, llama_python, plan, click.echo)
    except (ModelError, GgufPeerError) as error:
        fail(str(error))
    show_figures({"model": Path(model).name, **found}, json_file)


@click.command("kv-formats")
@click.option(
    "--model",
    default="smollm2",
    show_default=True,
    help="Model: a GGUF file, a Hugging Face folder or id.",
)
@click.option("--tokens", type=COUNT, default=1024, show_default=True, help="Tokens of the text.")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text of the perplexity; default: docs/architecture.md.",
)
@json_option
def kv_formats(model: str, tokens: int, text: Path | None, json_file: str | None) -> None:
    """Compare KVCache in fp8 with KVCache in the model's own number format."""
    from benchmarks.suite.engine.kv_formats import bench_kv_formats
    from moonpool.engine.spec import ModelError

    try:
        found = bench_kv_formats(model, tokens, text, click.echo)
    except ModelError as error:
        fail(str(error))
    show_figures(found, json_file)


@click.command()
@click.option(
    "--model",
    default="random:m150",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option(
    "--repeats",
    type=COUNT,
    default=3,
    show_default=True,
    help="Measure each single step this often.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random choices.")
@json_option
def sarathi(model: str, repeats: int, seed: int, json_file: str | None) -> None:
    """Measure chunked prefill: decode speed-ups, P:D, tails of TBT, KVCache occupation.

    Each figure is measured and predicted. One thread, about three minutes.
    """
    from benchmarks.suite.engine.sarathi import bench_sarathi
    from moonpool.engine.spec import ModelError

    try:
        found = bench_sarathi(model, repeats, seed, click.echo)
    except ModelError as error:
        fail(str(error))
    show_figures(found, json_file)


@click.command()
@click.option(
    "--model",
    default="random:m150",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option(
    "--stages",
    type=click.IntRange(2, 64),
    default=2,
    show_default=True,
    help="Number of pipeline stages.",
)
@click.option(
    "--prompt-tokens",
    type=COUNT,
    default=16_384,
    show_default=True,
    help="Tokens of the long prompt.",
)
@click.option(
    "--max-num-batched-tokens",
    type=COUNT,
    default=512,
    show_default=True,
    help="Most tokens of one step (the prefill chunk).",
)
@click.option(
    "--short-tokens", type=COUNT, default=256, show_default=True, help="Tokens of the short prompt."
)
@click.option(
    "--repeats",
    type=COUNT,
    default=5,
    show_default=True,
    help="Measure the short prompt this often.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random choices.")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["long", "short", "mixed", "decode"]),
    help="Run only this part; repeat for more, all unless given.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device that computes.",
)
@json_option
def pipeline(
    model: str,
    stages: int,
    prompt_tokens: int,
    max_num_batched_tokens: int,
    short_tokens: int,
    repeats: int,
    seed: int,
    parts: tuple[str, ...],
    device: str,
    json_file: str | None,
) -> None:
    """Compare an instance of several stages with one of one stage.

    The parts are a long prompt, a short one, prompts with decodes, and decodes. Each is measured,
    and simulated for up to 8 stages. One thread a stage, three minutes.
    """
    from benchmarks.suite.engine.pipeline import PARTS, bench_pipeline
    from moonpool.engine.device import check_device
    from moonpool.engine.parallel.process_group import StageLostError
    from moonpool.transfer.arena import ArenaError

    chunk_tokens = max_num_batched_tokens
    try:
        check_device(device)
        found = bench_pipeline(
            model,
            stages,
            prompt_tokens,
            chunk_tokens,
            short_tokens,
            repeats,
            seed,
            parts or PARTS,
            click.echo,
            device,
        )
    except (ArenaError, StageLostError, ValueError) as error:
        fail(str(error))
    show_figures(found, json_file)


@click.command()
@click.option(
    "--model",
    default="random:m150",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option(
    "--ranks",
    type=click.Choice(["2", "4", "8"]),
    default="2",
    show_default=True,
    help="Number of tensor-parallel ranks.",
)
@click.option(
    "--repeats", type=COUNT, default=3, show_default=True, help="Measure each case this often."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write all figures to this file."
)
def tensor(model: str, ranks: str, repeats: int, json_file: str | None) -> None:
    """Compare an instance of several ranks with one process: prompts, decodes, share of sums.

    One thread a rank, about two minutes.
    """
    from benchmarks.suite.engine.tensor import bench_tensor
    from moonpool.engine.parallel.process_group import StageLostError
    from moonpool.transfer.arena import ArenaError

    try:
        found = bench_tensor(model, int(ranks), repeats, click.echo)
    except (ArenaError, StageLostError, ValueError) as error:
        fail(str(error))
    write_json(json_file, found | {"origin": origin()})
