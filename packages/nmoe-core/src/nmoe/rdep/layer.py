# SPDX-License-Identifier: Apache-2.0
"""The MoE layer: a router, the routed experts (here or across the ranks), and the shared one beside them.

The routed experts are one autograd function, so that what is kept for backward is stated in one place. At D=2048 F=1408
K=6 in bf16 that is 37 KiB a token; the activations and the results of the experts would be another 40.
"""

import torch
from torch import Tensor, nn

from nmoe.comm.communicator import Communicator
from nmoe.config import Moe
from nmoe.rdep.exchange import Exchange, owned_experts
from nmoe.rdep.experts import Experts
from nmoe.rdep.many_nodes import ExpertsAcrossNodes
from nmoe.rdep.many_ranks import ExpertsAcross
from nmoe.rdep.nodes import NodeExchange
from nmoe.rdep.one_rank import ExpertsHere
from nmoe.rdep.overlap import start_beside
from nmoe.rdep.router import Router, Routes

__all__ = ["MoE", "experts_across"]


class MoE(nn.Module):
    """Routed experts of one layer, and the shared one beside them.

    Args:
        hidden_size: D.
        config: The section [moe].
        comm: The ranks that share the routed experts.
        shared: Network that every token passes through, or None.
        dtype: Of the master values.
        layer: Index, for messages.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        config: Moe,
        comm: Communicator,
        shared: nn.Module | None,
        dtype: torch.dtype,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.exchange: Exchange | NodeExchange | None = None
        """Where rows meet the experts of other ranks; None where this rank holds them all."""
        owned = owned_experts(config.num_experts, comm)
        self.router = Router(hidden_size=hidden_size, config=config, dtype=dtype)
        self.experts = Experts(hidden_size=hidden_size, expert_size=config.expert_size, owned=owned, dtype=dtype)
        self.shared = shared

    def forward(self, x_TD: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pass T tokens of ``num_rows`` sequences through their experts.

        Returns:
            out_TD in x's dtype; the router's balance and z-loss [2], summed over tokens; load_E, int32.
        """
        routes = self.router(x_TD, num_rows)
        x_TD = routes.x_TD
        if self.shared is None:
            out_TD = self._routed(x_TD, routes)
        elif self.exchange is None:
            out_TD = self._routed(x_TD, routes) + self.shared(x_TD)
        else:
            shared = start_beside(self.shared, x_TD)
            out_TD = self._routed(x_TD, routes) + shared()
        return out_TD, routes.aux_loss, routes.load_E

    def _routed(self, x_TD: Tensor, routes: Routes) -> Tensor:
        exchange, layer = self.exchange, self.layer
        if exchange is None:
            assert len(self.experts.owned) == routes.load_E.numel(), "experts of other ranks need an exchange"
            return self.experts(ExpertsHere.apply, x_TD, routes.gate_TK, routes.expert_TK)

        def across(*operands: Tensor | bool) -> Tensor:
            return experts_across(exchange).apply(*operands, exchange, layer)

        return self.experts(across, x_TD, routes.gate_TK, routes.expert_TK)


def experts_across(exchange: Exchange | NodeExchange) -> type[ExpertsAcross] | type[ExpertsAcrossNodes]:
    """The routed experts of the ranks that this exchange connects."""
    return ExpertsAcrossNodes if isinstance(exchange, NodeExchange) else ExpertsAcross
