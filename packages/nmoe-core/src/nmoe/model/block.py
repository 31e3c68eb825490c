# SPDX-License-Identifier: Apache-2.0
"""One layer of the transformer: attention, then a dense network or a MoE layer."""

import torch
from torch import Tensor, nn

from nmoe.comm.communicator import Communicator
from nmoe.config import Config
from nmoe.model.attention import Cache, Positions, attention_of
from nmoe.model.functional import Norm, recomputed
from nmoe.model.mlp import MLP
from nmoe.rdep.layer import MoE

__all__ = ["Block"]


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: Config, index: int, *, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        model, moe = config.model, config.moe
        D, recompute = model.hidden_size, config.train.recompute
        self.recompute_attention, recompute_mlp = "attention" in recompute, "mlp" in recompute
        self.scale = model.residual_scale
        self.attn_norm = Norm(D, eps=model.norm_eps, dtype=dtype)
        self.attn = attention_of(config, index, dtype=dtype)
        self.ffn_norm = Norm(D, eps=model.norm_eps, dtype=dtype)
        if index < model.num_dense_layers:
            self.mlp, self.moe = MLP(hidden_size=D, ffn_size=model.ffn_size, dtype=dtype, recompute=recompute_mlp), None
        else:
            width = moe.num_shared_experts * moe.expert_size
            shared = MLP(hidden_size=D, ffn_size=width, dtype=dtype, recompute=recompute_mlp) if width else None
            self.mlp = None
            self.moe = MoE(hidden_size=D, config=moe, comm=comm, shared=shared, dtype=dtype, layer=index)
            self.moe.experts.recompute = "experts" in recompute

    def _add(self, x_TD: Tensor, out_TD: Tensor) -> Tensor:
        return torch.add(x_TD, out_TD, alpha=self.scale)

    def _attend(self, x_TD: Tensor, at: Positions) -> Tensor:
        return self._add(x_TD, self.attn(self.attn_norm(x_TD), at))

    def forward(
        self, x_TD: Tensor, at: Positions, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x_TD after the layer; the router's losses [2] and load_E, None where the layer is dense."""
        if cache is not None:
            x_TD = self._add(x_TD, self.attn.extend(self.attn_norm(x_TD), at, cache))
        elif self.recompute_attention:
            x_TD = recomputed(self._attend, x_TD, at)
        else:
            x_TD = self._attend(x_TD, at)
        normed_TD = self.ffn_norm(x_TD)
        if self.moe is None:
            assert self.mlp is not None
            return self._add(x_TD, self.mlp(normed_TD)), None, None
        out_TD, aux_loss, load_E = self.moe(normed_TD, at.num_rows)
        return self._add(x_TD, out_TD), aux_loss, load_E
