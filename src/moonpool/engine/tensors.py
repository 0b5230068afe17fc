"""The names and shapes of a model's tensors, as Hugging Face checkpoints spell them."""

from __future__ import annotations

from moonpool.engine.spec import ModelSpec

Shape = tuple[int, ...]


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor a model of `spec` needs, in the order of use; weights are [out, in]."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(spec).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q, spec.o_bias),
        "mlp.gate_proj": (inter, hidden, spec.mlp_bias),
        "mlp.up_proj": (inter, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inter, spec.mlp_bias),
    }
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for name, (out_features, in_features, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (out_features, in_features)
        if has_bias:
            shapes[f"{name}.bias"] = (out_features,)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes
