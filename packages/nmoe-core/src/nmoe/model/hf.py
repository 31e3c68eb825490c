# SPDX-License-Identifier: Apache-2.0
"""How Hugging Face names what this model calls otherwise: families, config keys, tensor keys. No files, no torch.

A family is a translation of the config in both directions and a table of tensor names; the transformer is one. Every
tensor of a checkpoint belongs to exactly one `Entry`, so what is missing or unknown can be listed before any is read.

Source: the published config.json files and the classes of the package transformers (deepseek_v2, deepseek_v3,
qwen3_moe), whose keys and defaults are repeated here as facts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nmoe.config import Config, parse_config
from nmoe.config.text import format_value
from nmoe.errors import DataError

__all__ = ["Entry", "config_from_hf", "config_to_hf", "copies", "entries", "family_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor of ours, or one expert of it, and what it is made of."""

    ours: str
    """Name in the model's state."""
    theirs: tuple[str, ...]
    """One name: the same tensor. Two: gate and up projection, whose rows ours interleaves."""
    expert: int | None = None
    """Global id: the entry is ours[expert]."""


# ---------------------------------------------------------------------------------------------------------------------
# Tensor names

_MLA = {
    "wq_a": "q_a_proj.weight",
    "q_norm.weight": "q_a_layernorm.weight",
    "wkv_a": "kv_a_proj_with_mqa.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "wkv_b": "kv_b_proj.weight",
    "wo": "o_proj.weight",
}
_GQA = {
    "wq": "q_proj.weight",
    "wk": "k_proj.weight",
    "wv": "v_proj.weight",
    "q_norm.weight": "q_norm.weight",
    "k_norm.weight": "k_norm.weight",
    "wo": "o_proj.weight",
}


def _attention(config: Config, ours: str, theirs: str) -> Iterator[Entry]:
    if config.attention.kind == "gqa":
        table = _GQA
    elif config.attention.q_lora_rank:
        table = {**_MLA, "wq": "q_b_proj.weight"}
    else:
        table = {k: v for k, v in _MLA.items() if k not in ("wq_a", "q_norm.weight")} | {"wq": "q_proj.weight"}
    for name, key in table.items():
        yield Entry(ours=f"{ours}attn.{name}", theirs=(f"{theirs}self_attn.{key}",))


def _network(ours: str, theirs: str, expert: int | None = None) -> Iterator[Entry]:
    pair = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    yield Entry(ours=f"{ours}w13", theirs=pair, expert=expert)
    yield Entry(ours=f"{ours}w2", theirs=(f"{theirs}down_proj.weight",), expert=expert)


def _layer(config: Config, layer: int) -> Iterator[Entry]:
    depth = layer - config.model.num_layers
    ours, theirs = f"layers.{layer}." if depth < 0 else f"mtp.{depth}.block.", f"model.layers.{layer}."
    yield Entry(ours=f"{ours}attn_norm.weight", theirs=(f"{theirs}input_layernorm.weight",))
    yield from _attention(config, ours, theirs)
    yield Entry(ours=f"{ours}ffn_norm.weight", theirs=(f"{theirs}post_attention_layernorm.weight",))
    if layer < config.model.num_dense_layers:
        yield from _network(f"{ours}mlp.", f"{theirs}mlp.")
        return
    yield Entry(ours=f"{ours}moe.router.weight", theirs=(f"{theirs}mlp.gate.weight",))
    if config.moe.selection_bias:
        yield Entry(ours=f"{ours}moe.router.bias", theirs=(f"{theirs}mlp.gate.e_score_correction_bias",))
    experts = [
        [*_network(f"{ours}moe.experts.", f"{theirs}mlp.experts.{expert}.", expert)]
        for expert in range(config.moe.num_experts)
    ]
    for weight in zip(*experts, strict=True):  # all of w13, then all of w2: each of ours is fetched once
        yield from weight
    if config.moe.num_shared_experts:
        yield from _network(f"{ours}moe.shared.", f"{theirs}mlp.shared_experts.")


def copies(config: Config) -> dict[str, str]:
    """Keys that a folder may hold beside its entries -> the key whose values they repeat."""
    tied = config.model.tie_embeddings
    found = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    for depth in range(config.model.mtp_depth):
        theirs = f"model.layers.{config.model.num_layers + depth}."
        found[f"{theirs}embed_tokens.weight"] = "model.embed_tokens.weight"
        found[f"{theirs}shared_head.head.weight"] = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return found


def entries(config: Config) -> Iterator[Entry]:
    """Every tensor of a model, in the order of the layers."""
    yield Entry(ours="embed", theirs=("model.embed_tokens.weight",))
    for layer in range(config.model.num_layers):
        yield from _layer(config, layer)
    for depth in range(config.model.mtp_depth):
        theirs = f"model.layers.{config.model.num_layers + depth}."
        for name, key in (("enorm", "enorm"), ("hnorm", "hnorm"), ("norm", "shared_head.norm")):
            yield Entry(ours=f"mtp.{depth}.{name}.weight", theirs=(f"{theirs}{key}.weight",))
        yield Entry(ours=f"mtp.{depth}.proj", theirs=(f"{theirs}eh_proj.weight",))
        yield from _layer(config, config.model.num_layers + depth)
    yield Entry(ours="norm.weight", theirs=("model.norm.weight",))
    if not config.model.tie_embeddings:
        yield Entry(ours="head", theirs=("lm_head.weight",))


# ---------------------------------------------------------------------------------------------------------------------
# Configs

_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Values that config.json leaves out where they are the class's own.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
    "deepseek_v3": {"norm_topk_prob": True, "rope_interleave": True},
    "qwen3_moe": {"norm_topk_prob": False, "decoder_sparse_step": 1},
}
# (key, the only value that this model computes)
_FIXED: dict[str, tuple[tuple[str, Any], ...]] = {
    "deepseek_v2": (("norm_topk_prob", False), ("moe_layer_freq", 1), ("mlp_bias", False), ("scoring_func", "softmax")),
    "deepseek_v3": (("rope_interleave", True), ("moe_layer_freq", 1), ("scoring_func", "sigmoid")),
    "qwen3_moe": (("decoder_sparse_step", 1), ("use_sliding_window", False)),
}


def family_of(config: Config) -> str:
    """The Hugging Face model type that computes what this config computes.

    Raises:
        DataError: There is none, with the reason.
    """
    a, moe = config.attention, config.moe
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        if getattr(config.model, key) != 1:
            raise DataError(f"model.{key}: no Hugging Face family here has such a factor")
    if a.window:
        raise DataError("attention.window: no Hugging Face family here has windows between global layers")
    if a.kind == "gqa":
        rules = {
            "attention.qk_norm": a.qk_norm,
            "attention.qk_nope_head_dim = 0": a.qk_nope_head_dim == 0,
            "attention.v_head_dim = attention.qk_rope_head_dim": a.v_head_dim == a.qk_rope_head_dim,
            'moe.scoring = "softmax"': moe.scoring == "softmax",
            "moe.selection_bias = false": not moe.selection_bias,
            "moe.num_groups = 1": moe.num_groups == 1,
            "moe.num_shared_experts = 0": moe.num_shared_experts == 0,
            "moe.route_scale = 1": moe.route_scale == 1,
        }
        family = "qwen3_moe"
    elif moe.scoring == "sigmoid":
        grouped = moe.num_groups == 1 or moe.group_score == "top2_sum"
        rules = {"moe.selection_bias": moe.selection_bias, 'moe.group_score = "top2_sum"': grouped}
        rules["moe.num_shared_experts >= 1"] = moe.num_shared_experts >= 1
        family = "deepseek_v3"
    else:
        grouped = moe.num_groups == 1 or moe.group_score == "max"
        rules = {"moe.selection_bias = false": not moe.selection_bias, 'moe.group_score = "max"': grouped}
        rules |= {"moe.normalize_gates = false": not moe.normalize_gates}
        rules["moe.num_shared_experts >= 1"] = moe.num_shared_experts >= 1
        family = "deepseek_v2"
    rules["model.mtp_depth = 0"] = family == "deepseek_v3" or config.model.mtp_depth == 0
    for rule, holds in rules.items():
        if not holds:
            raise DataError(f"{family} is the nearest Hugging Face family, and it needs {rule}")
    return family


def _rope_to_hf(config: Config) -> dict[str, Any]:
    rope = config.rope
    if rope.scaling == "none":
        return {"rope_theta": rope.theta, "rope_scaling": None, "max_position_embeddings": config.data.seq_len}
    if rope.mscale_all_dim == 0 and rope.mscale != 1:
        raise DataError(
            f"rope.mscale = {rope.mscale} without rope.mscale_all_dim has no meaning in transformers; use 1"
        )
    yarn = {
        "rope_type": "yarn",
        "type": "yarn",  # the older spelling, which other programs read
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_context,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
    }
    if rope.mscale_all_dim:
        yarn |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    context = int(rope.factor * rope.original_context)
    return {"rope_theta": rope.theta, "rope_scaling": yarn, "max_position_embeddings": context}


def config_to_hf(config: Config) -> dict[str, Any]:
    """A config.json for this model.

    Raises:
        DataError: No family computes what this config does.
    """
    family, model, a, moe = family_of(config), config.model, config.attention, config.moe
    common = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "num_attention_heads": a.num_heads,
        "moe_intermediate_size": moe.expert_size,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize_gates,
        **_rope_to_hf(config),
    }
    if family == "qwen3_moe":
        dense = list(range(model.num_dense_layers))
        heads = {"num_key_value_heads": a.num_kv_heads, "head_dim": a.qk_rope_head_dim, "use_sliding_window": False}
        return common | heads | {"num_experts": moe.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    latent = {
        "num_key_value_heads": a.num_heads,
        "q_lora_rank": a.q_lora_rank or None,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.qk_nope_head_dim,
        "qk_rope_head_dim": a.qk_rope_head_dim,
        "v_head_dim": a.v_head_dim,
    }
    routing = {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "routed_scaling_factor": moe.route_scale,
        "n_group": moe.num_groups,
        "topk_group": moe.top_k_groups,
        "scoring_func": moe.scoring,
        "first_k_dense_replace": model.num_dense_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": model.mtp_depth,
    }
    method = "noaux_tc" if family == "deepseek_v3" else "group_limited_greedy" if moe.num_groups > 1 else "greedy"
    return common | latent | routing | {"topk_method": method}


def _rope_from_hf(hf: Mapping[str, Any], where: str) -> dict[str, Any]:
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    if kind == "default":
        return {"theta": theta}
    if kind != "yarn" or rope.get("attention_factor") is not None or rope.get("truncate", True) is not True:
        raise DataError(f"{where}: rope {rope}: only plain rotation and YaRN without attention_factor are known here")
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if all_dim and not mscale:
        raise DataError(f"{where}: rope has mscale_all_dim = {all_dim} without mscale, which is not known here")
    return {
        "theta": theta,
        "scaling": "yarn",
        "factor": float(rope["factor"]),
        "original_context": int(rope["original_max_position_embeddings"]),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(mscale) if mscale and all_dim else 1.0,
        "mscale_all_dim": float(all_dim or 0.0),
    }


def _dense_layers(hf: Mapping[str, Any], where: str) -> int:
    if "first_k_dense_replace" in hf:
        return int(hf["first_k_dense_replace"])
    dense = sorted(hf.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise DataError(f"{where}: mlp_only_layers = {dense}: only the first layers can be dense here")
    return len(dense)


def _mtp_depth(hf: Mapping[str, Any]) -> int:
    return int(hf.get("num_nextn_predict_layers") or hf.get("num_mtp_layers") or 0)


def _sections(hf: Mapping[str, Any], family: str, where: str) -> dict[str, dict[str, Any]]:
    model = {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_dense_layers": _dense_layers(hf, where),
        "ffn_size": hf["intermediate_size"],
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "init_std": float(hf.get("initializer_range", 0.02)),
        "mtp_depth": _mtp_depth(hf) if family == "deepseek_v3" else 0,
    }
    moe = {
        "expert_size": hf["moe_intermediate_size"],
        "top_k": hf["num_experts_per_tok"],
        "normalize_gates": bool(hf.get("norm_topk_prob", False)),
        "scoring": "sigmoid" if family == "deepseek_v3" else "softmax",
        "selection_bias": family == "deepseek_v3",
    }
    if family == "qwen3_moe":
        width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        attention = {
            "kind": "gqa",
            "num_heads": hf["num_attention_heads"],
            "num_kv_heads": hf["num_key_value_heads"],
            "qk_rope_head_dim": width,
            "v_head_dim": width,
            "qk_norm": True,
        }
        moe |= {"num_experts": hf.get("num_experts") or hf["num_local_experts"], "num_shared_experts": 0}
    else:
        keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        attention = {"num_heads": hf["num_attention_heads"], "q_lora_rank": hf.get("q_lora_rank") or 0}
        attention |= {key: hf[key] for key in keys}
        moe |= {
            "num_experts": hf.get("n_routed_experts") or hf["num_local_experts"],
            "num_shared_experts": hf.get("n_shared_experts") or 0,
            "route_scale": float(hf["routed_scaling_factor"]),
        }
        if family == "deepseek_v3" or hf["topk_method"] == "group_limited_greedy":
            score = "top2_sum" if family == "deepseek_v3" else "max"
            moe |= {"num_groups": hf["n_group"], "top_k_groups": hf["topk_group"], "group_score": score}
    return {"model": model, "attention": attention, "rope": _rope_from_hf(hf, where), "moe": moe}


_TRAINING = """
# What follows is about training and not part of the model: set it before training goes on.
[data]
train = ["data/train"]
seq_len = {context}

[train]
steps = 1000
batch_size = 8
micro_batch_size = 1

[optim]
learning_rate = 1e-5

[schedule]
warmup_steps = 100
decay_steps = 100

[checkpoint]
every = 500
"""


def config_from_hf(hf: Mapping[str, Any], *, where: str) -> tuple[Config, str]:
    """Our config of a Hugging Face model.

    Args:
        hf: Content of its config.json.
        where: Name of the file, for messages.

    Returns:
        The config and its TOML text, in which the sections about training are placeholders.

    Raises:
        DataError: The model type is unknown, or a key has a value that this model does not compute.
    """
    family = hf.get("model_type")
    if family not in _ARCHITECTURES:
        raise DataError(f"{where}: model_type = {family!r}, expected one of {', '.join(_ARCHITECTURES)}")
    hf = {**_DEFAULTS[family], **{key: value for key, value in hf.items() if value is not None}}
    for key, only in (("hidden_act", "silu"), ("attention_bias", False), *_FIXED[family]):
        if hf.get(key, only) != only:
            raise DataError(f"{where}: {key} = {hf[key]!r}, and only {only!r} is known here")
    try:
        sections = _sections(hf, family, where)
    except KeyError as error:
        raise DataError(f"{where}: key {error.args[0]!r} is missing") from None
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {format_value(value)}" for key, value in values.items()), ""]
    context = min(int(hf.get("max_position_embeddings", 4096)), 4096)
    text = "\n".join(lines) + _TRAINING.format(context=context)
    return parse_config(text, where=where, name="imported"), text
