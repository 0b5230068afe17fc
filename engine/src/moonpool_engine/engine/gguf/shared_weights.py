"""Weights that one process packs for the local workers that are forked from it.

The weights are never written again, so all workers of a machine share their pages, and a restarted
worker has them at once. The same holds for the vocabulary that grammars need.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import torch

from moonpool.config.tables import Config, EngineConfig, ModelConfig
from moonpool.text.grammar import Grammars
from moonpool.text.tokenizer import TokenizerError
from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.device_choice import resolve_device, resolve_dtype
from moonpool_engine.engine.gguf.files import gguf_file
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.runner import choose_ops, grammars_of

log = logging.getLogger("moonpool.worker")


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """A model with its weights packed for the CPU, in one part."""

    config: ModelConfig  # config with a resolved dtype
    model: LoadedModel
    decoder: DecoderModel
    grammars: Grammars  # prepared, unless they can wait

    def fit(self, model: ModelConfig, engine: EngineConfig) -> bool:
        """Whether an instance of one process computes with these weights. Device and dtype are
        resolved."""
        return model == self.config and engine.device == "cpu" and engine.num_shards == 1


def share_weights(config: Config) -> SharedWeights | None:
    """Packs the weights of a GGUF file, in a process that stays without further threads.

    Returns None for a model that its workers load themselves: a model of another kind, or one
    computed by several ranks or stages, on a GPU or with attention workers. A model that cannot be
    loaded is also left to the workers, which report why. Other kinds of models are packed by
    torch's threads, which no fork survives.
    """
    engine, own = config.engine, config.model
    parts = max(
        engine.pipeline_parallel_size, engine.decode_pipeline_parallel_size, engine.num_shards
    )
    if engine.kind != "moonpool" or parts > 1 or config.cluster.attention:
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if gguf_file(own.name) is None or resolve_device(engine.device) != "cpu":
            return None
        dtype = resolve_dtype(own.dtype, "cpu")
        model = open_model(own.name, dtype, own.lora_modules, own.kv_cache_dtype)
        ops = choose_ops(model.dtype, "cpu", own.quantization)
        grammars = grammars_of(model)
        grammars.can_wait = config.cluster.num_instances == 1  # others would each read the same
        # the executor's thread ends with the block, before any fork
        with ThreadPoolExecutor(1) as beside:
            reading = None if grammars.can_wait else beside.submit(grammars.prepare)
            with torch.inference_mode():
                decoder = DecoderModel(model.spec, model.weights, ops, adapters=model.adapters)
            if reading is not None:
                reading.result()
    except (TokenizerError, ValueError, RuntimeError, OSError) as error:
        log.debug("workers load the model by themselves: %s", error)
        return None
    finally:
        torch.set_num_threads(threads)
    model.release()
    return SharedWeights(msgspec.structs.replace(own, dtype=dtype), model, decoder, grammars)
