"""Makes tiny checkpoints of every served family, with a tokenizer, and lists the ways to serve
them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moonpool.text.model_error import ModelError
from moonpool_engine.attention_offload.partition import WorkerBlockRanges
from moonpool_engine.attention_offload.remote_ops import RemoteOps
from moonpool_engine.engine.builtin import LoadedModel
from moonpool_engine.engine.families.registry import FAMILIES
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.parallel.tensor_model import check_shards
from moonpool_engine.engine.reference import ReferenceSplitOps
from tests.differential.checkpoints import CASES, Case, save

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

POSITIONS = 1024
CASE_OF: dict[str, Case] = {
    "llama": CASES["llama-rope3"],
    "mistral": CASES["mistral-window"],
    "mixtral": CASES["mixtral"],
    "qwen2": CASES["qwen2"],
    "qwen3": CASES["qwen3"],
    "qwen3_moe": CASES["qwen3-moe-sparse"],
    "qwen2_moe": CASES["qwen2-moe"],
    "qwen3_5_text": CASES["qwen3.5"],
    "qwen3_next": CASES["qwen3-next"],
    "qwen3_5_moe_text": CASES["qwen3.5-moe"],
    "smollm3": CASES["smollm3"],
    "phi3": CASES["phi3-window"],
    "olmo2": CASES["olmo2"],
    "olmo3": CASES["olmo3"],
    "olmoe": CASES["olmoe"],
    "exaone4": CASES["exaone4"],
    "ernie4_5": CASES["ernie4.5"],
    "ernie4_5_moe": CASES["ernie4.5-moe"],
    "glm4": CASES["glm4"],
    "seed_oss": CASES["seed-oss"],
    "glm4_moe": CASES["glm4-moe"],
    "glm4_moe_lite": CASES["glm4-moe-lite"],
    "granite": CASES["granite"],
    "granitemoe": CASES["granite-moe"],
    "granitemoehybrid": CASES["granite4"],
    "gemma": CASES["gemma"],
    "gemma2": CASES["gemma2"],
    "gemma3_text": CASES["gemma3"],
    "deepseek_v2": CASES["deepseek-v2"],
    "deepseek_v3": CASES["deepseek-v3"],
    "gpt_oss": CASES["gpt-oss"],
}
"""Maps each family to a model of it, with the parts that the family has besides Llama's."""
assert CASE_OF.keys() == FAMILIES.keys()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a tokenizer with all bytes and a few merges, in fewer tokens than the smallest
    vocabulary."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def write(family: str, folder: Path, case: Case | None = None) -> None:
    """Writes a checkpoint of the family, for texts of 1,024 tokens, with KV heads for two ranks."""
    case = CASE_OF[family] if case is None else case
    changes = {**case.changes, "max_position_embeddings": POSITIONS}
    if changes.get("num_key_value_heads") == 1:
        changes["num_key_value_heads"] = 2
    save(replace(case, changes=changes), folder)
    make_tokenizer().save_pretrained(folder)


WAYS: dict[str, list[str]] = {
    "stages and SSD": [
        *("--prefill", "1", "--decode", "1", "--decode-pipeline-parallel-size", "2"),
        *("--ssd-tokens", "4096"),
        *("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}'),
    ],
    "ranks": ["--prefill", "1", "--decode", "1", "--tensor-parallel-size", "2"],
    "attention workers": ["--prefill", "1", "--decode", "1", "--attention", "2"],
}
"""Maps each way to the arrangement that is served. All have separate prefill and decode instances
and a prefix cache."""


def flags_of(family: str, way: str) -> list[str]:
    """Returns the flags of a way, without drafts for a family that cannot take draft tokens
    back."""
    flags = WAYS[way]
    at = flags.index("--speculative-config") if "--speculative-config" in flags else None
    return flags[:at] if at is not None and FAMILIES[family].delta else flags


def refusal(model: LoadedModel, way: str) -> str:
    """Returns why a way cannot serve a model, in the words of the instance at its start, or "" if
    the way serves the model."""
    try:
        if way == "ranks":
            check_shards(model.spec, 2)
        elif way == "attention workers":
            remote = RemoteOps(ReferenceSplitOps(), [None, None], WorkerBlockRanges((8, 8)))
            DecoderModel(model.spec, model.weights, remote)
    except ModelError as error:
        return str(error)
    return ""
