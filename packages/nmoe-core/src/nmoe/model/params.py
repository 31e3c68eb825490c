# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and number of the parameters of a config, from its dimensions alone (no torch, no memory).

DeepSeek-V3's 671 billion are counted in under a millisecond, so that ``--dry-run`` can plan memory anywhere.
"""

import math
from collections.abc import Iterator

from nmoe.config import Config

__all__ = ["block_shapes", "count_parameters", "parameter_shapes"]


def _attention(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    a, D = config.attention, config.model.hidden_size
    yield "wo", (D, a.num_heads * a.v_head_dim)
    if a.kind == "gqa":
        yield "wq", (a.num_heads * a.qk_head_dim, D)
        yield "wk", (a.num_kv_heads * a.qk_head_dim, D)
        yield "wv", (a.num_kv_heads * a.v_head_dim, D)
        if a.qk_norm:
            yield "q_norm.weight", (a.qk_head_dim,)
            yield "k_norm.weight", (a.qk_head_dim,)
        return
    if a.q_lora_rank:
        yield "wq_a", (a.q_lora_rank, D)
        yield "q_norm.weight", (a.q_lora_rank,)
    yield "wq", (a.num_heads * a.qk_head_dim, a.q_lora_rank or D)
    yield "wkv_a", (a.kv_lora_rank + a.qk_rope_head_dim, D)
    yield "kv_norm.weight", (a.kv_lora_rank,)
    yield "wkv_b", (a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)


def _feed_forward(config: Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    model, moe = config.model, config.moe
    D, E, F = model.hidden_size, moe.num_experts, moe.expert_size
    if layer < model.num_dense_layers:
        yield "mlp.w13", (2 * model.ffn_size, D)
        yield "mlp.w2", (D, model.ffn_size)
        return
    yield "moe.router.weight", (E, D)
    yield "moe.experts.w13", (E, 2 * F, D)
    yield "moe.experts.w2", (E, D, F)
    if moe.num_shared_experts:
        yield "moe.shared.w13", (2 * F * moe.num_shared_experts, D)
        yield "moe.shared.w2", (D, F * moe.num_shared_experts)


def block_shapes(config: Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name in its layer -> shape of a layer's parameters; those of multi-token prediction count on after the last layer."""
    yield "attn_norm.weight", (config.model.hidden_size,)
    yield from ((f"attn.{name}", shape) for name, shape in _attention(config))
    yield "ffn_norm.weight", (config.model.hidden_size,)
    yield from _feed_forward(config, layer)


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every trained parameter, with all E experts; the selection bias is a buffer, not a parameter."""
    model = config.model
    shapes: dict[str, tuple[int, ...]] = {"embed": (model.vocab_size, model.hidden_size)}
    for layer in range(model.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block_shapes(config, layer)}
    for depth in range(model.mtp_depth):
        shapes |= {f"mtp.{depth}.{name}.weight": (model.hidden_size,) for name in ("enorm", "hnorm", "norm")}
        shapes[f"mtp.{depth}.proj"] = (model.hidden_size, 2 * model.hidden_size)
        block = block_shapes(config, model.num_layers + depth)
        shapes |= {f"mtp.{depth}.block.{name}": shape for name, shape in block}
    shapes["norm.weight"] = (model.hidden_size,)
    if not model.tie_embeddings:
        shapes["head"] = (model.vocab_size, model.hidden_size)
    return shapes


def count_parameters(config: Config) -> tuple[int, int]:
    """Trained parameters in all, and those that one token passes through (embedding and head counted in both)."""
    shapes = parameter_shapes(config)
    total = sum(math.prod(shape) for shape in shapes.values())
    routed = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    return total, total - routed + routed * config.moe.top_k // config.moe.num_experts
