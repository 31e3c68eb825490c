# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients of a small model of every family, for comparing dtypes and implementations.

NMOE_ARCH=reference python model_runs.py FILE      computes every family in fp64 on the CPU and in bf16 on the GPU
"""

import sys

import torch
from torch import Tensor

from nmoe.comm.local import Local
from nmoe.config import parse_config
from nmoe.model.init import init_model, normal
from nmoe.model.transformer import IGNORED, Transformer

BASE = """
[model]
vocab_size = 521
hidden_size = 128
num_layers = 3
num_dense_layers = 1
ffn_size = 192
[attention]
num_heads = 4
kv_lora_rank = 64
qk_nope_head_dim = 128
qk_rope_head_dim = 64
v_head_dim = 128
[moe]
num_experts = 16
num_shared_experts = 1
top_k = 4
expert_size = 96
balance_loss = 1e-3
[data]
train = ["unused"]
seq_len = 320
[train]
steps = 1
batch_size = 1
micro_batch_size = 1
dtype = "bf16"
z_loss = 1e-4
[optim]
learning_rate = 1e-3
[schedule]
warmup_steps = 0
[checkpoint]
every = 1
"""
_QWEN = (
    "attention.kind=gqa",
    "attention.num_heads=8",
    "attention.num_kv_heads=2",
    "attention.kv_lora_rank=0",
    "attention.qk_nope_head_dim=0",
    "attention.qk_rope_head_dim=128",
    "attention.qk_norm=true",
    "moe.scoring=softmax",
    "moe.num_shared_experts=0",
)
FAMILIES: dict[str, tuple[str, ...]] = {
    "deepseek_v3": (
        "attention.q_lora_rank=96",
        "moe.num_groups=4",
        "moe.top_k_groups=2",
        "moe.route_scale=2.5",
        "rope.scaling=yarn",
        "rope.factor=4.0",
        "rope.original_context=64",
        "model.mtp_depth=1",
    ),
    "deepseek_v2": (
        "moe.scoring=softmax",
        "moe.num_groups=4",
        "moe.top_k_groups=2",
        "moe.group_score=max",
        "moe.normalize_gates=false",
        "moe.route_scale=4.0",
    ),
    "moonlight": ("moe.num_shared_experts=2", "moe.route_scale=2.446", "model.tie_embeddings=true"),
    "qwen3_moe": _QWEN,
    "windows": (*_QWEN, "model.num_layers=4", "attention.window=40", "attention.global_every=2"),
}
SEEDS = (0, 1, 2)
_LENGTHS = [200, 1, 1, 150, 64, 3]


def run(family: str, *, dtype: str, device: str, seed: int) -> dict[str, Tensor]:
    """Loss of two packed rows, and the gradient of every parameter, on the CPU; in fp64 from the same values.

    Args:
        family: Of `FAMILIES`.
        dtype: As in `train.dtype`.
        device: ``cpu`` or ``cuda``.
        seed: Of the tokens.
    """
    config = parse_config(BASE, where="base", name="base", overrides=[*FAMILIES[family], f"train.dtype={dtype}"])
    with torch.device(device):
        model = Transformer(config, comm=Local(device))
    init_model(model, 1)
    with torch.no_grad():  # values of a size at which every part of the model matters
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if name.endswith("norm.weight") else 2.0)
        for router in model.routers().values():
            if router.bias is not None:
                bias = torch.empty(router.bias.shape, dtype=router.bias.dtype)
                normal(bias, std=0.05, seed=4, name="bias")
                router.bias.copy_(bias)
    tokens, number, position = _packed(seed)
    targets = torch.where(number[:, 1:] == number[:, :-1], tokens[:, 1:], IGNORED)
    targets = torch.nn.functional.pad(targets, (0, 1), value=IGNORED)
    output = model(
        tokens.to(device), positions_BT=position.to(device), document_BT=number, targets_BT=targets.to(device)
    )
    ((output.loss_sum + output.aux_loss) / output.num_targets).backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss_sum.detach().cpu(), "mtp": output.mtp_loss.cpu(), **gradients}


def _packed(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, documents and positions of two rows of 320."""
    number = torch.cat([torch.full((length,), i) for i, length in enumerate(_LENGTHS * 2)])[:640].view(2, 320)
    position = torch.zeros_like(number)
    for i in range(1, 320):
        position[:, i] = torch.where(number[:, i] == number[:, i - 1], position[:, i - 1] + 1, 0)
    tokens = torch.randint(0, 521, (2, 320), generator=torch.Generator().manual_seed(seed))
    return tokens, number, position


if __name__ == "__main__":
    results = {
        family: [
            {
                "truth": run(family, dtype="fp64", device="cpu", seed=seed),
                "plain": run(family, dtype="bf16", device="cuda", seed=seed),
            }
            for seed in SEEDS
        ]
        for family in FAMILIES
    }
    torch.save(results, sys.argv[1])
