"""Real processes serve a common checkpoint folder, and their answers equal those of
transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.forked.commands import LocalServer
from tests.live.test_faults import run_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} say <tool_call>{}</tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES: Any = [
    {"role": "system", "content": "You count waves."},
    {"role": "user", "content": "How many waves came in, und wie groß waren sie? " * 12},
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a small Qwen3 with random weights that are large enough for choices without ties."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    where = tmp_path_factory.mktemp("qwen3")
    tokenizer = make_tokenizer()
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LocalServer]:
    arguments = [str(folder), "--dtype", "float32", "--served-model-name", "waves"]
    with LocalServer([*arguments, "--prefill", "1", "--decode", "1", "--kv-tokens", "8192"]) as up:
        yield up


def test_chat_answers_as_transformers_does(folder: Path, server: LocalServer) -> None:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt")
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    with torch.inference_mode():
        whole = model.generate(ids, max_new_tokens=40, do_sample=False)
    expected_ids = whole[0, ids.shape[1] :].tolist()
    expected = tokenizer.decode(expected_ids, skip_special_tokens=True)

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for _ in range(2):
        answer = client.chat.completions.create(
            model="waves", messages=MESSAGES, max_tokens=40, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == ids.shape[1]
        assert answer.choices[0].message.content == expected
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    stream = client.chat.completions.create(
        model="waves", messages=MESSAGES, max_tokens=40, temperature=0, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == expected


@pytest.mark.long
def test_a_damaged_checkpoint_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    done = run_command("serve", str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "model.layers.1.mlp.down_proj.weight" in done.stderr.strip().splitlines()[-1]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_model_that_must_call_a_tool_does(server: LocalServer, choice: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "waves", "messages": MESSAGES, "tools": [WEATHER]}
    asked |= {"tool_choice": choice, "seed": 3, "max_tokens": 600}
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls[:1]
    assert whole.finish_reason == "tool_calls" and call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2, 3)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    pieces = [
        piece for chunk in chunks for piece in chunk.delta.tool_calls or () if not piece.index
    ]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    # The tool's result goes back to the model.
    turn: Any = whole.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    asked |= {
        "messages": [*MESSAGES, turn, result],
        "tool_choice": "auto",
        "tools": [WEATHER, CLOCK],
    }
    again = client.chat.completions.create(**asked | {"max_tokens": 8})
    assert again.choices[0].finish_reason in ("length", "stop")
