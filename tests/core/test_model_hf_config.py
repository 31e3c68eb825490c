# SPDX-License-Identifier: Apache-2.0
"""What is refused between Hugging Face and here: configs in either direction, tensors on the way in."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmoe.config import load_config, parse_config
from nmoe.errors import ConfigError, DataError
from nmoe.model.hf import config_from_hf, config_to_hf, entries
from nmoe.model.hf_files import HFFolder

transformers = pytest.importorskip("transformers", reason="the oracle; in the group dev of the workspace")


def _save(folder: Path) -> None:
    """A small random model of transformers."""
    small = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "moe_intermediate_size": 20}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8}
    small |= {"kv_lora_rank": 18, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    small |= {"first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**small)).save_pretrained(folder)


def _damage(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.5.up_proj.weight"),
            r"missing: model\.layers\.1\.mlp\.experts\.5\.up_p",
        ),
        (lambda t: t.update(extra=torch.zeros(2)), "unknown: extra"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(40, 97)}),
            r"reshaped: lm_head\.weight \(40, 97\), expected \(97, 40\)",
        ),
    ],
    ids=["missing", "unknown", "reshaped"],
)
def test_import_accounts_for_every_key(change, message, tmp_path):
    _save(tmp_path)
    _damage(tmp_path, change)
    with HFFolder(tmp_path) as hf:
        config, _ = config_from_hf(hf.config, where="config.json")
        with pytest.raises(DataError, match=message):
            hf.check(config)


def test_import_dequantises_fp8_blocks(tmp_path):
    _save(tmp_path)
    key = "model.layers.0.mlp.gate_proj.weight"
    exact = torch.randn(300, 200)
    scale = torch.rand(3, 2) + 0.5
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    _damage(
        tmp_path, lambda t: t.update({key: (exact / full).to(torch.float8_e4m3fn), key + "_scale_inv": scale.clone()})
    )
    with HFFolder(tmp_path) as hf:
        (entry,) = [e for e in entries(config_from_hf(hf.config, where="config.json")[0]) if key in e.theirs]
        read = hf.read(type(entry)(ours=entry.ours, theirs=(key,)))
        assert hf._is_scale(key + "_scale_inv")
    torch.testing.assert_close(read, exact, rtol=0.07, atol=0.01)
    torch.testing.assert_close(read, (exact / full).to(torch.float8_e4m3fn).float() * full, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama', expected one of deepseek_v2, deepseek_v3, qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', and only 'silu'"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "only plain rotation and YaRN"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_import_refuses_what_it_does_not_compute(change, message):
    hf = transformers.DeepseekV3Config().to_dict() | change
    with pytest.raises((DataError, ConfigError), match=message):
        config_from_hf(hf, where="config.json")


def test_import_names_a_missing_key():
    hf = transformers.DeepseekV3Config().to_dict()
    del hf["kv_lora_rank"]
    with pytest.raises(DataError, match=r"config\.json: key 'kv_lora_rank' is missing"):
        config_from_hf(hf, where="config.json")


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("dsv3", "moe.group_score=max", 'deepseek_v3 is the nearest .* needs moe.group_score = "top2_sum"'),
        ("dsv2", "moe.normalize_gates=true", "deepseek_v2 .* needs moe.normalize_gates = false"),
        ("dsv2", "model.mtp_depth=1", "deepseek_v2 .* needs model.mtp_depth = 0"),
        ("dsv3", "attention.window=4", r"attention\.window"),
        ("dsv3", "model.logit_scale=0.5", r"model\.logit_scale"),
    ],
)
def test_export_refuses_what_no_family_computes(name, override, message):
    with pytest.raises(DataError, match=message):
        config_to_hf(load_config(f"configs/{name}.toml", [override]))


def test_export_of_grouped_queries_refuses_what_qwen3_does_not_compute():
    _, text = config_from_hf(transformers.Qwen3MoeConfig().to_dict(), where="config.json")
    config = parse_config(text, where="x", name="x", overrides=["moe.route_scale=2.0"])
    with pytest.raises(DataError, match=r"qwen3_moe .* needs moe\.route_scale = 1"):
        config_to_hf(config)


@pytest.mark.parametrize("name", ["moonlight", "dsv2", "dsv3"])
def test_shipped_configs_are_the_published_models(name):
    # Dimensions of the published config.json files, as transformers' own classes state them where they do.
    ours = config_to_hf(load_config(f"configs/{name}.toml"))
    published = {
        "dsv3": transformers.DeepseekV3Config().to_dict(),
        "dsv2": {"hidden_size": 5120, "n_group": 8, "topk_group": 3, "n_routed_experts": 160, "q_lora_rank": 1536},
        "moonlight": {"hidden_size": 2048, "n_group": 1, "n_routed_experts": 64, "num_hidden_layers": 27},
    }[name]
    skipped = ("num_mtp_layers", "num_nextn_predict_layers", "max_position_embeddings", "initializer_range")
    for key in published.keys() & ours.keys() - set(skipped):
        if key not in ("architectures", "rope_scaling"):
            assert ours[key] == published[key], key
