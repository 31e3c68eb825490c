# SPDX-License-Identifier: Apache-2.0
"""The router: scores of all experts for each token, the choice of K, and what keeps the load level.

Levelling needs no auxiliary loss: a bias per expert, moved a little after every step, makes busy experts harder to
choose (DeepSeek-V3, arXiv 2412.19437, 2.1.2). Two losses may be added: the sequence-wise balance loss of the same paper
(equations 17 to 20) and the z-loss of ST-MoE (arXiv 2202.08906, equation 5).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmoe.config import Moe
from nmoe.ops.route_topk import Routing, project, route

__all__ = ["Router", "Routes"]


class Routes(NamedTuple):
    """The choice for T tokens. A tuple, because FSDP hangs hooks on the tensors in a module's result, and looks for them
    in tuples: before PyTorch 2.15 not in dataclasses."""

    expert_TK: Tensor
    """int32: global ids, best first."""
    gate_TK: Tensor
    """fp32 (fp64 for fp64 rows): weights of their results."""
    load_E: Tensor
    """int32: tokens that chose each expert."""
    aux_loss: Tensor
    """[2]: balance loss and z-loss, each times its weight, summed over tokens."""
    x_TD: Tensor
    """The rows, for what comes after the router (`project` says why)."""


class Router(nn.Module):
    """Scores, choice and gates for the experts of one layer. Its arithmetic is fp32 whatever the rows are (fp64: fp64).

    Args:
        hidden_size: D.
        config: The section [moe].
        dtype: Of the master values.
    """

    bias: Tensor | None

    def __init__(self, *, hidden_size: int, config: Moe, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, dtype=dtype))
        """[E, D]."""
        self.register_buffer("bias", torch.zeros(config.num_experts, dtype=dtype) if config.selection_bias else None)
        self.balance_loss, self.z_loss = config.balance_loss, config.z_loss
        self.routing = Routing(
            top_k=config.top_k,
            scoring=config.scoring,
            num_groups=config.num_groups,
            top_k_groups=config.top_k_groups,
            group_score=config.group_score,
            normalize=config.normalize_gates,
            scale=config.route_scale,
        )

    def forward(self, x_TD: Tensor, num_rows: int) -> Routes:
        """Choose experts for T tokens of ``num_rows`` equally long sequences."""
        logits_TE, x_TD = project(x_TD, self.weight)
        expert_TK, gate_TK, load_E = route(logits_TE, self.bias, routing=self.routing)
        balance = z = logits_TE.new_zeros(())
        if self.balance_loss:
            balance = self.balance_loss * self._balance(logits_TE, expert_TK, num_rows)
        if self.z_loss:
            z = self.z_loss * torch.logsumexp(logits_TE, dim=-1).square().sum()
        aux_loss = torch.stack((balance, z))
        return Routes(expert_TK=expert_TK, gate_TK=gate_TK, load_E=load_E, aux_loss=aux_loss, x_TD=x_TD)

    def _balance(self, logits_TE: Tensor, expert_TK: Tensor, num_rows: int) -> Tensor:
        """Sum over sequences of their length times sum_e f_e P_e; 1 a token when the load is even."""
        tokens, experts = logits_TE.shape
        if tokens == 0:
            return logits_TE.sum()
        if self.routing.scoring == "sigmoid":
            scores_TE = torch.sigmoid(logits_TE)
            scores_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
        else:
            scores_TE = torch.softmax(logits_TE, dim=-1)
        chosen_TE = torch.zeros_like(scores_TE).scatter_(1, expert_TK.to(torch.int64), 1.0)
        chosen_BE = chosen_TE.view(num_rows, -1, experts).mean(dim=1) * (experts / self.routing.top_k)
        share_BE = scores_TE.view(num_rows, -1, experts).mean(dim=1)
        return (chosen_BE * share_BE).sum() * (tokens // num_rows)

    @torch.no_grad()
    def update_bias(self, load_E: Tensor, rate: float) -> None:
        """Move the bias of every expert by ``rate`` towards an even load: down where it was above the mean, else up.

        Once a step, with the load of the whole global batch, so that neither recomputation nor accumulation counts
        twice. Does nothing for a router without selection bias.

        Args:
            load_E: Tokens that chose each expert, any dtype.
            rate: Step of the bias, in scores.
        """
        if self.bias is not None:
            # In integers the comparison with the mean is exact, whatever the order of summation was.
            above_E = load_E * load_E.numel() - load_E.sum()
            self.bias -= rate * torch.sign(above_E).to(self.bias.dtype)
