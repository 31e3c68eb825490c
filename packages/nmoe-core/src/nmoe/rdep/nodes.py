# SPDX-License-Identifier: Apache-2.0
"""Which exchange a group of ranks gets: one among all of them, or, over several nodes, one a rail and one a node.

======================  =============================  ======================================
nodes x ranks of each   exchange                       peers
======================  =============================  ======================================
1 x P                   `Exchange`                     all by stores
P x 1                   `Exchange`                     all by puts
N x G                   `NodeExchange`                 N of the rail by puts, G of the node by stores
======================  =============================  ======================================
"""

from functools import partial
from typing import Any

import torch

from nmoe.comm.communicator import Communicator
from nmoe.comm.layout import WIRES
from nmoe.comm.part import node_of, rail_of
from nmoe.config import Config
from nmoe.rdep.exchange import Exchange, owned_experts

__all__ = ["NodeExchange", "exchange_of", "exchange_over"]


class NodeExchange:
    """What the layers of one model share across the ranks of several nodes.

    Args:
        comm: All ranks.
        tokens: T_max.
        num_experts: E.
        top_k: K.
        settings: The other arguments of `Exchange`.

    Attributes:
        rail: Between the ranks of equal place in all nodes; "rank" n of it owns the experts of its node.
        node: Between the ranks of this node, each of which brings what came to it by its rail.
        nbytes: Symmetric memory of each rank.
    """

    def __init__(self, comm: Communicator, *, tokens: int, num_experts: int, top_k: int, **settings: Any) -> None:
        owned_experts(num_experts, comm)  # all ranks, and not first those of a node, have to divide them
        rail, node = rail_of(comm), node_of(comm)
        exchange = partial(Exchange, top_k=top_k, load=tokens * top_k, **settings)
        self.comm = comm
        self.rail = exchange(rail, tokens=tokens, num_experts=num_experts, name="rdep rail")
        self.node = exchange(node, tokens=rail.size * tokens, num_experts=num_experts // rail.size, name="rdep node")
        self.nbytes = self.rail.nbytes + self.node.nbytes

    def be_patient(self) -> None:
        """See `Exchange`."""
        self.rail.be_patient()
        self.node.be_patient()

    def arm(self) -> None:
        """See `Exchange`."""
        self.rail.arm()
        self.node.arm()


def exchange_over(comm: Communicator, **settings: Any) -> Exchange | NodeExchange:
    """The exchange of these ranks; ``settings`` are the arguments of `Exchange`. Collective."""
    if 1 < comm.node_size < comm.size:
        return NodeExchange(comm, **settings)
    return Exchange(comm, **settings)


def exchange_of(config: Config, comm: Communicator, *, dtype: torch.dtype) -> Exchange | NodeExchange:
    """That of a model under training, for rows of this dtype; patient until it is armed. Collective."""
    exchange = exchange_over(
        comm,
        tokens=config.train.micro_batch_size * config.data.seq_len,
        hidden_size=config.model.hidden_size,
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
        dtype=dtype,
        wire=WIRES.get(config.rdep.wire),
        capacity=config.rdep.capacity,
        exact=config.rdep.sizes == "exact",
        timeout_s=config.rdep.timeout_s,
    )
    exchange.be_patient()
    return exchange
