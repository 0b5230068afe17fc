"""`moonpool bench engine|quantization|formats|sarathi|...`: the engine of one instance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from benchmarks.cli.annotated import Model, Repeats, Seed, options
from benchmarks.cli.output import measure, show
from moonpool.cli.options import json_option
from moonpool.cli.output import one_line, show_figures


@click.command()
@options
@json_option
def engine(
    *,
    model: Model = "random:m150",
    peer_python: Annotated[
        str | None, "Compare with vLLM's CPU build of this Python installation."
    ] = None,
    openvino_python: Annotated[
        str | None, "Compare with openvino-genai of this Python, which also has optimum-intel."
    ] = None,
    llama_python: Annotated[
        str | None, "Compare with llama-cpp-python of this Python, which also has gguf."
    ] = None,
    peer_eager: Annotated[
        bool, "Keep vLLM from compiling: it starts sooner and runs slower."
    ] = False,
    prefills: Annotated[tuple[int, ...], "Tokens of a prompt; repeat for more.", "--prompt"] = (
        512,
        2048,
        8192,
    ),
    batches: Annotated[
        tuple[int, ...], "Number of sequences of a decode step; repeat for more.", "--batch"
    ] = (1, 8, 32),
    contexts: Annotated[
        tuple[int, ...],
        "Context tokens of each decode; all are computed, and 32 of 4,096 take minutes.",
        "--context",
    ] = (512, 4096),
    chunk_tokens: Annotated[int, "Tokens of a prefill chunk of all engines."] = 512,
    repeats: Annotated[int, "Measure each prefill this often; the best counts."] = 3,
    json_file: str | None,
) -> None:
    """Measure prefill and decode, against the machine's limits, vLLM, OpenVINO and llama.cpp.

    The limits are GEMM rate and memory bandwidth. All engines use one thread.
    """
    from benchmarks.suite.engine.engine import bench_engine
    from benchmarks.suite.engine.engine_rows import EngineBenchRows

    rows = EngineBenchRows(prefills, batches, contexts, chunk_tokens)
    pythons = {"vllm": peer_python, "openvino": openvino_python, "llama.cpp": llama_python}
    peers = {name: python for name, python in pythons.items() if python is not None}
    show(lambda: bench_engine(model, rows, peers, peer_eager, repeats, click.echo), json_file)


@click.command()
@options
@json_option
def quantization(
    *,
    model: Model = "moonpool/induction",
    prompts: Annotated[int, "Number of prompts."] = 32,
    answer_tokens: Annotated[int, "Tokens of each answer."] = 64,
    seed: Seed = 0,
    json_file: str | None,
) -> None:
    """Compare weights of 8 bits with bfloat16: KL, perplexity, greedy answers and tokens/s.

    Both kinds of weights are measured on one thread.
    """
    from benchmarks.suite.engine.quantization import bench_quantization

    show(lambda: bench_quantization(model, prompts, answer_tokens, seed, click.echo), json_file)


@click.command()
@options
@json_option
def formats(
    *,
    model: Annotated[str, "GGUF file."] = "smollm2",
    llama_python: Annotated[
        str | None, "Compare with llama-cpp-python of this Python, which also has numpy."
    ] = None,
    ik_programs: Annotated[
        Path | None,
        "Compare with ik_llama.cpp: the folder of its llama-bench and llama-batched-bench.",
        click.Path(exists=True, file_okay=False, path_type=Path),
    ] = None,
    rounds: Annotated[
        int, "Rounds in which the engines run in turns, after one that does not count."
    ] = 7,
    threads: Annotated[tuple[int, ...], "Threads of each engine; repeat for more."] = (1, 2),
    tokens: Annotated[int, "Tokens of the text."] = 1024,
    text: Annotated[
        Path | None,
        "Text of the perplexity; default: docs/architecture.md.",
        click.Path(exists=True, dir_okay=False, path_type=Path),
    ] = None,
    converted: Annotated[
        bool, "Compare the model in other formats instead; MODEL may also be a Hugging Face folder."
    ] = False,
    json_file: str | None,
) -> None:
    """Measure a GGUF file by moonpool and llama.cpp: time, read bandwidth and perplexity.

    ik_llama.cpp is compared in time only. With --converted, compares quantized weights with float32
    in quality and with bfloat16 in time.
    """
    from benchmarks.suite.engine.formats import TEXT, bench_formats
    from benchmarks.suite.engine.gguf_engines import GgufBenchPlan, bench_gguf_engines

    source = text or TEXT

    def run() -> dict[str, Any]:
        if converted:
            found = bench_formats(model, tokens, source, click.echo)
        else:
            plan = GgufBenchPlan(rounds, threads, llama_python, ik_programs)
            found = bench_gguf_engines(model, tokens, source, plan, click.echo)
        return {"model": Path(model).name, **found}

    show(run, json_file)


@click.command("kv-formats")
@options
@json_option
def kv_formats(
    *,
    model: Annotated[str, "Model: a GGUF file, a Hugging Face folder or id."] = "smollm2",
    tokens: Annotated[int, "Tokens of the text."] = 1024,
    text: Annotated[
        Path | None,
        "Text of the perplexity; default: docs/architecture.md.",
        click.Path(exists=True, dir_okay=False, path_type=Path),
    ] = None,
    json_file: str | None,
) -> None:
    """Compare KVCache in fp8 with KVCache in the model's own number format."""
    from benchmarks.suite.engine.kv_formats import bench_kv_formats

    show(lambda: bench_kv_formats(model, tokens, text, click.echo), json_file)


@click.command()
@options
@json_option
def sarathi(
    *,
    model: Model = "random:m150",
    repeats: Annotated[int, "Measure each single step this often."] = 3,
    seed: Seed = 0,
    json_file: str | None,
) -> None:
    """Measure chunked prefill: decode speed-ups, P:D, tails of TBT, KVCache occupation.

    Each figure is measured and predicted. Takes about three minutes on one thread.
    """
    from benchmarks.suite.engine.sarathi import bench_sarathi

    show(lambda: bench_sarathi(model, repeats, seed, click.echo), json_file)


@click.command()
@options
@json_option
def pipeline(
    *,
    model: Model = "random:m150",
    stages: Annotated[int, "Number of pipeline stages.", click.IntRange(2, 64)] = 2,
    prompt_tokens: Annotated[int, "Tokens of the long prompt."] = 16_384,
    max_num_batched_tokens: Annotated[int, "Most tokens of one step (the prefill chunk)."] = 512,
    short_tokens: Annotated[int, "Tokens of the short prompt."] = 256,
    repeats: Annotated[int, "Measure the short prompt this often."] = 5,
    seed: Seed = 0,
    parts: Annotated[
        tuple[str, ...],
        "Run only this part; repeat for more, all unless given.",
        "--part",
        click.Choice(["long", "short", "mixed", "decode"]),
    ] = (),
    device: Annotated[str, "Device that computes.", click.Choice(["cpu", "cuda"])] = "cpu",
    json_file: str | None,
) -> None:
    """Compare an instance of several stages with one of one stage.

    The parts are a long prompt, a short one, prompts with decodes, and decodes. Each part is
    measured, and simulated for up to 8 stages. Takes three minutes, with one thread for each stage.
    """
    from benchmarks.suite.engine.pipeline import PARTS, bench_pipeline
    from moonpool_engine.engine.device_choice import check_device
    from moonpool_engine.engine.parallel.process_group import StageLostError
    from moonpool_engine.transfer.arena import ArenaError

    chunk_tokens = max_num_batched_tokens
    with one_line(ArenaError, StageLostError, ValueError):
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
    show_figures(found, json_file)


@click.command()
@options
@json_option
def tensor(
    *,
    model: Model = "random:m150",
    ranks: Annotated[str, "Number of tensor-parallel ranks.", click.Choice(["2", "4", "8"])] = "2",
    repeats: Repeats = 3,
    json_file: str | None,
) -> None:
    """Compare an instance of several ranks with one process: prompts, decodes, share of sums.

    Takes about two minutes, with one thread for each rank.
    """
    from benchmarks.suite.engine.tensor import bench_tensor

    measure(lambda: bench_tensor(model, int(ranks), repeats, click.echo), json_file)
