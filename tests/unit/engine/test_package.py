"""The engine describes GGUF files on CPUs to a head without an import of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from moonpool.config.tables import Config, EngineConfig, ModelConfig, SpeculativeConfig
from moonpool.text.model_error import ModelError
from moonpool_engine import package
from moonpool_engine.engine import builtin
from moonpool_engine.engine.quantized.formats import FORMATS
from moonpool_engine.engine.quantized.sizes import SIZES
from tests.unit.engine.gguf_files import tiny_llama

WITHOUT_TORCH = """
import sys
from pathlib import Path
from moonpool.config.tables import Config, EngineConfig, ModelConfig
import moonpool.head.cluster
from moonpool_engine import package

config = Config(model=ModelConfig(name=sys.argv[1]), engine=EngineConfig(device="cpu"))
assert package.describes_quickly(config)
info = package.model_info(sys.argv[1], "float32")
parts = package.gguf_parts(Path(sys.argv[1]))
device, dtype = package.device_and_dtype(config, True)
print(info.vocab_size, device, "torch" in sys.modules)
"""


def test_a_head_reads_a_gguf_file_without_torch(tmp_path: Path) -> None:
    path = tiny_llama({"": "Q8_0"}).write(tmp_path / "m.gguf")
    line = [sys.executable, "-c", WITHOUT_TORCH, str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    vocab_size = builtin.model_info(str(path), "float32").vocab_size
    assert done.stdout.split() == [str(vocab_size), "cpu", "False"]


def test_it_reads_what_the_engine_computes_with(tmp_path: Path) -> None:
    path = tiny_llama({"": "Q4_0"}).write(tmp_path / "m.gguf")
    assert package.model_info(str(path), "float32") == builtin.model_info(str(path), "float32")
    with pytest.raises(ModelError, match="does not exist"):
        package.model_info(str(tmp_path / "none.gguf"), "float32")


@pytest.mark.parametrize(
    ("name", "drafts", "lora", "device", "quick"),
    [
        ("m.gguf", "", (), "cpu", True),
        ("smollm2", "", (), "cpu", True),
        ("owner/name:m.Q4_0.gguf", "d.gguf", (), "cpu", True),
        ("m.gguf", "owner/drafts", (), "cpu", False),
        ("m.gguf", "", ("a=b",), "cpu", False),
        ("m.gguf", "", (), "cuda", False),
        ("moonpool/induction", "", (), "cpu", False),
        ("owner/name", "", (), "cpu", False),
    ],
)
def test_other_models_are_read_by_the_engine(
    name: str, drafts: str, lora: tuple[str, ...], device: str, quick: bool
) -> None:
    speculation = SpeculativeConfig(method="draft_model", model=drafts) if drafts else None
    engine = msgspec.structs.replace(EngineConfig(), device=device, speculative_config=speculation)
    config = Config(model=ModelConfig(name=name, lora_modules=lora), engine=engine)
    assert package.describes_quickly(config) is quick


def test_the_sizes_of_groups_are_those_of_the_formats() -> None:
    found = {name: (format.group, format.bytes) for name, format in FORMATS.items()}
    assert found == dict(SIZES)
