# SPDX-License-Identifier: Apache-2.0
"""The peers of `moe_layer.py`: each is (layer, parameters) over the same router weight, so that all see one routing.

Softmax over all experts, then the K best; sonic-moe takes the softmax of the K best, which costs the same.
"""

import statistics
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE, HALF = "cuda", torch.bfloat16
Layer = tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]


def weights(experts: int, width: int, hidden: int) -> tuple[Tensor, Tensor]:
    """w13 [E, 2F, D] and w2 [E, D, F] of a peer."""
    w13 = torch.randn(experts, 2 * hidden, width, device=DEVICE, dtype=HALF) * width**-0.5
    return w13, torch.randn(experts, width, hidden, device=DEVICE, dtype=HALF) * hidden**-0.5


class Plain(nn.Module):
    """The layer as one writes it in PyTorch: sort, grouped products, index_add."""

    def __init__(self, router: Tensor, hidden: int, top_k: int):
        super().__init__()
        self.top_k, self.router = top_k, nn.Parameter(router.clone())
        experts, width = router.shape
        w13, w2 = weights(experts, width, hidden)
        self.w13, self.w2 = nn.Parameter(w13.mT.contiguous()), nn.Parameter(w2.mT.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = F.linear(x, self.router).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.zeros(self.w13.shape[0], dtype=torch.int32, device=x.device).scatter_add_(
            0, chosen.view(-1), torch.ones_like(chosen.view(-1), dtype=torch.int32)
        )
        offsets = counts.cumsum(0).int()
        rows = order // self.top_k
        gate, up = F.grouped_mm(x[rows], self.w13, offs=offsets).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.w2, offs=offsets)
        return torch.zeros_like(x).index_add_(0, rows, y * gates.view(-1)[order].unsqueeze(1).to(y.dtype))


def eager(router: Tensor, hidden: int, top_k: int) -> Layer:
    layer = Plain(router, hidden, top_k)
    return layer, [*layer.parameters()]


def compiled(router: Tensor, hidden: int, top_k: int) -> Layer:
    layer = Plain(router, hidden, top_k)
    return torch.compile(layer), [*layer.parameters()]


def ours(router: Tensor, hidden: int, top_k: int) -> Layer:
    from nmoe.comm.local import Local
    from nmoe.config import Moe
    from nmoe.rdep.layer import MoE

    experts, width = router.shape
    config = Moe(
        num_experts=experts,
        num_shared_experts=0,
        top_k=top_k,
        expert_size=hidden,
        scoring="softmax",
        selection_bias=False,
        normalize_gates=False,
    )
    with torch.device(DEVICE):
        layer = MoE(hidden_size=width, config=config, comm=Local(DEVICE), shared=None, dtype=HALF)
    layer.experts.hold(copies=True)  # as the trainer does: gradients add up in place
    with torch.no_grad():
        layer.router.weight.copy_(router)
        for held, value in zip((layer.experts.w13, layer.experts.w2), weights(experts, width, hidden), strict=True):
            held.copy_(value)
    return lambda x: layer(x, 1)[0], [*layer.parameters()]


def sonic(router: Tensor, hidden: int, top_k: int) -> Layer:
    _tune_quickly()
    import sonicmoe  # type: ignore[import-not-found]
    from sonicmoe.enums import ActivationType  # type: ignore[import-not-found]
    from sonicmoe.functional import moe_TC_softmax_topk_layer  # type: ignore[import-not-found]

    experts, width = router.shape
    layer = sonicmoe.MoE(experts, top_k, width, hidden, ActivationType.SWIGLU, False, 0.02).to(DEVICE, HALF)
    with torch.no_grad():
        layer.router.weight.copy_(router)
    up, down = layer.c_fc.weight.permute(1, 2, 0), layer.c_proj.weight.permute(1, 2, 0)

    def run(x: Tensor) -> Tensor:  # its layer without its auxiliary loss, which nobody else here computes
        return moe_TC_softmax_topk_layer(x, layer.router.weight, up, None, down, None, top_k, layer.stream_id)[0]

    return run, [*layer.parameters()]


def _tune_quickly() -> None:
    """Lets quack's tuner time five launches a candidate, and sonic-moe's reduction try fewer: minutes become seconds."""

    def five(launch: Callable[[], object], quantiles: object = None) -> list[float]:
        del quantiles
        launch()
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            launch()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return [statistics.median(times)] * 3

    tuner: Any = import_module("quack.autotuner").Autotuner
    original = tuner.__init__

    def init(self: Any, *args: Any, **keys: Any) -> None:
        original(self, *args, **keys)
        self._do_bench = five

    tuner.__init__ = init
    import_module("quack.gemm_interface").gemm_tuned._do_bench = five
    for value in vars(import_module("sonicmoe.functional.reduction_over_k_gather")).values():
        if type(value).__name__ == "Autotuner":
            value.configs = [c for c in value.configs if c.kwargs["BLOCK_H"] in (1024, 2048) and c.num_warps == 4]


def transformers(router: Tensor, hidden: int, top_k: int) -> Layer:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    experts, width = router.shape
    config = Qwen3MoeConfig(
        hidden_size=width,
        moe_intermediate_size=hidden,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=False,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(DEVICE):
        layer = Qwen3MoeSparseMoeBlock(config).to(HALF)
    held = (layer.gate.weight, layer.experts.gate_up_proj, layer.experts.down_proj)
    with torch.no_grad():
        for parameter, value in zip(held, (router, *weights(experts, width, hidden)), strict=True):
            parameter.copy_(value)  # type: ignore[operator]
    return lambda x: layer(x.unsqueeze(0)).squeeze(0), [*layer.parameters()]


def liger(router: Tensor, hidden: int, top_k: int) -> Layer:
    from liger_kernel.ops import LigerFusedMoEFunction  # type: ignore[import-not-found]

    experts, width = router.shape
    held = [nn.Parameter(value.clone()) for value in (router, *weights(experts, width, hidden))]

    def run(x: Tensor) -> Tensor:
        gates, chosen = F.linear(x, held[0]).float().softmax(dim=-1).topk(top_k, dim=-1)
        return LigerFusedMoEFunction.apply(x, held[1], held[2], chosen.int(), gates.to(x.dtype))

    return run, held


PEERS = {
    "nmoe": ours,
    "sonic-moe": sonic,
    "torch.compile": compiled,
    "eager": eager,
    "transformers": transformers,
    "liger-kernel": liger,
}
