# SPDX-License-Identifier: Apache-2.0
"""Who holds which rows of the model: dense parameters over all ranks, experts over the ranks that have the same ones.

PyTorch's FSDP2 gathers a layer's rows before it is computed and adds up the gradients behind it, while the layers beside
it compute. The rows are master values. Matrices travel in the dtype that they are multiplied in; what is used in full
precision travels so: norms and routers, the embedding and the head (their gradients are sums over many tokens), and
experts, whose gradients are summed in the masters' dtype. So every product is that of one rank. Gradients are summed, not
averaged, because the loss is divided by the targets of the global batch already.
"""

import warnings
from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from nmoe.model.block import Block
from nmoe.model.functional import Norm
from nmoe.model.transformer import Transformer
from nmoe.rdep.router import Router
from nmoe.train.ranks import Ranks

__all__ = ["hold", "shard"]


def shard(model: Transformer, *, ranks: Ranks, gather: Literal["layer", "step"]) -> None:
    """Divides the parameters of a model over the ranks, in place; with one rank it does nothing.

    Args:
        model: with parameters on any device, "meta" among them.
        ranks: all of them.
        gather: `parallel.gather`.
    """
    if not ranks.mesh:
        return
    # A router hands on its rows, a view; FSDP warns that a write into it would lose its hook. Nothing is written there.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    wide = MixedPrecisionPolicy(cast_forward_inputs=False)
    free = gather == "layer"
    apart: set[nn.Parameter] = set()
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        if block.moe is not None:
            apart.update(block.moe.experts.parameters())
            if ranks.data_size > 1:
                fully_shard(block.moe.experts, mesh=ranks.mesh["data"], mp_policy=wide, reshard_after_forward=free)
        policy = wide
        if model.dtype != model.embed.dtype:
            precise: list[nn.Module] = [m for m in block.modules() if isinstance(m, Norm | Router)]
            fully_shard(precise, mesh=ranks.world, mp_policy=wide, reshard_after_forward=free)
            policy = MixedPrecisionPolicy(
                param_dtype=model.dtype, reduce_dtype=model.embed.dtype, cast_forward_inputs=False
            )
        fully_shard(block, mesh=ranks.world, mp_policy=policy, reshard_after_forward=free, ignored_params=apart)
    fully_shard(model, mesh=ranks.world, mp_policy=wide, reshard_after_forward=False, ignored_params=apart)
    register_fsdp_forward_method(model, "extend")
    for module in _shards(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def hold(model: Transformer, *, last: bool) -> None:
    """Before a micro batch where `parallel.gather` is "step": parameters stay and gradients wait until the last one."""
    for module in _shards(model):
        module.set_reshard_after_backward(last, recurse=False)
        module.set_requires_gradient_sync(last, recurse=False)


def _shards(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
