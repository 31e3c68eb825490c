# SPDX-License-Identifier: Apache-2.0
"""Every file under configs/: it loads, it is the model that was published, and it reads back as written."""

import tomllib
from pathlib import Path

import pytest

from nmoe.config import load_config, parse_config
from nmoe.model.params import count_parameters

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))

COUNTS = {
    "moonlet": (7.34e9, 1.82e9),
    "moonlight": (15.96e9, 2.92e9),
    "dsv2": (235.7e9, 21.4e9),
    "dsv3": (671.0e9, 37.55e9),
}

# The dimensions of config.json of moonshotai/Moonlight-16B-A3B and deepseek-ai/DeepSeek-V2, in the keys of the configs here.
MOONLIGHT = """
model: hidden_size=2048 num_layers=27 num_dense_layers=1 ffn_size=11264 vocab_size=163840 norm_eps=1e-5 tie_embeddings=false
attention: num_heads=16 q_lora_rank=0 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128
rope: theta=50000.0 scaling="none"
moe: num_experts=64 num_shared_experts=2 top_k=6 expert_size=1408 num_groups=1 top_k_groups=1
moe: scoring="sigmoid" selection_bias=true normalize_gates=true route_scale=2.446
"""
DSV2 = """
model: hidden_size=5120 num_layers=60 num_dense_layers=1 ffn_size=12288 vocab_size=102400 norm_eps=1e-6 tie_embeddings=false
attention: num_heads=128 q_lora_rank=1536 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128
rope: theta=10000.0
moe: num_experts=160 num_shared_experts=2 top_k=6 expert_size=1536 num_groups=8 top_k_groups=3 group_score="max"
moe: scoring="softmax" selection_bias=false normalize_gates=false route_scale=16.0
"""
PUBLISHED = {
    "moonlight": MOONLIGHT,
    "moonlet": MOONLIGHT.replace("num_layers=27", "num_layers=12").replace("163840", "201088"),
    "dsv2": DSV2,
}


def test_every_shipped_config_is_checked_here():
    assert {path.stem for path in SHIPPED} == set(COUNTS) | {"quickstart"}
    assert count_parameters(load_config(ROOT / "configs/quickstart.toml"))[0] < 2e6


@pytest.mark.parametrize("name", COUNTS)
def test_shipped_config_has_the_published_number_of_parameters(name):
    for counted, published in zip(
        count_parameters(load_config(ROOT / f"configs/{name}.toml")), COUNTS[name], strict=True
    ):
        assert abs(counted / published - 1) < 0.005


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_config_has_the_published_dimensions(name):
    config = load_config(ROOT / f"configs/{name}.toml")
    for line in PUBLISHED[name].strip().splitlines():
        section, _, pairs = line.partition(": ")
        for key, value in tomllib.loads(pairs.replace(" ", "\n")).items():
            assert (key, getattr(getattr(config, section), key)) == (key, value)


def test_dsv3_has_the_dimensions_of_the_class_that_transformers_ships():
    from transformers import DeepseekV3Config

    published, config = DeepseekV3Config(), load_config(ROOT / "configs/dsv3.toml")
    model, attention, moe = config.model, config.attention, config.moe
    for ours, theirs in (
        (model.vocab_size, "vocab_size"),
        (model.hidden_size, "hidden_size"),
        (model.num_layers, "num_hidden_layers"),
        (model.num_dense_layers, "first_k_dense_replace"),
        (model.ffn_size, "intermediate_size"),
        (model.norm_eps, "rms_norm_eps"),
        (model.tie_embeddings, "tie_word_embeddings"),
        (attention.num_heads, "num_attention_heads"),
        (attention.q_lora_rank, "q_lora_rank"),
        (attention.kv_lora_rank, "kv_lora_rank"),
        (attention.qk_nope_head_dim, "qk_nope_head_dim"),
        (attention.qk_rope_head_dim, "qk_rope_head_dim"),
        (attention.v_head_dim, "v_head_dim"),
        (moe.num_experts, "n_routed_experts"),
        (moe.num_shared_experts, "n_shared_experts"),
        (moe.top_k, "num_experts_per_tok"),
        (moe.expert_size, "moe_intermediate_size"),
        (moe.num_groups, "n_group"),
        (moe.top_k_groups, "topk_group"),
        (moe.normalize_gates, "norm_topk_prob"),
        (moe.route_scale, "routed_scaling_factor"),
    ):
        assert ours == getattr(published, theirs), theirs
    # What DeepSeek-V3's modelling code fixes rather than configures.
    assert (moe.scoring, moe.selection_bias, moe.group_score) == ("sigmoid", True, "top2_sum")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_round_trip_of_shipped_configs(path):
    config = load_config(path)
    assert parse_config(config.to_toml(), where="again", name="again") == config
