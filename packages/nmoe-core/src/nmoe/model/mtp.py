# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: small heads behind the model that predict the tokens after the next one.

Depth k joins what depth k - 1 knows at position i (depth 0: the model itself, after its last norm) with the embedding
of token i + k, passes both through one layer of its own, and predicts token i + k + 1 with the model's own head. The
chain of causes stays whole at every depth. Only documents long enough have such a token; elsewhere nothing is learned.

Source: DeepSeek-V3 (arXiv 2412.19437, 2.2); which norms stand where, from its published checkpoint.
"""

import torch
from torch import Tensor, nn

from nmoe.comm.communicator import Communicator
from nmoe.config import Config
from nmoe.model.attention import Positions
from nmoe.model.block import Block
from nmoe.model.functional import Norm, linear
from nmoe.ops.cross_entropy import IGNORED

__all__ = ["Depth", "following", "mtp_weight"]


class Depth(nn.Module):
    """One further token.

    Args:
        config: Of the model.
        depth: k, from 1.
        comm: Ranks that share the experts.
        dtype: Of the master values.
    """

    def __init__(self, config: Config, depth: int, *, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        D, eps = config.model.hidden_size, config.model.norm_eps
        self.enorm, self.hnorm, self.norm = (Norm(D, eps=eps, dtype=dtype) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(D, 2 * D, dtype=dtype))
        """[D, 2D]: columns of the embedding first."""
        self.block = Block(config, config.model.num_layers + depth - 1, comm=comm, dtype=dtype)

    def forward(self, x_TD: Tensor, embedded_TD: Tensor, at: Positions) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x_TD of this depth, normed; the router's losses [2] and load_E, None where the layer is dense."""
        joined_TD = linear(torch.cat((self.enorm(embedded_TD), self.hnorm(x_TD)), dim=-1), self.proj)
        x_TD, aux_loss, load_E = self.block(joined_TD, at)
        return self.norm(x_TD), aux_loss, load_E


def following(targets_BT: Tensor, positions_BT: Tensor) -> Tensor:
    """Targets one token further on: IGNORED where the document, or the row, ends before.

    Args:
        targets_BT: int64: the next token, or what this made of it, or IGNORED.
        positions_BT: int64: place of each token in its document. The last target of a document may be a token (its end of
            text), so that targets alone do not tell where the next document begins.
    """
    further_BT = torch.full_like(targets_BT, IGNORED)
    ends_BT = (targets_BT[:, :-1] == IGNORED) | (positions_BT[:, 1:] == 0)
    further_BT[:, :-1] = targets_BT[:, 1:].masked_fill(ends_BT, IGNORED)
    return further_BT


def mtp_weight(config: Config, *, step: int) -> float:
    """Weight of the further tokens' loss in a step.

    Args:
        config: `train.mtp_weight` until step `train.mtp_late_step`, from then on `train.mtp_late_weight`.
        step: From 1.
    """
    train = config.train
    late = train.mtp_late_step > 0 and step >= train.mtp_late_step
    return train.mtp_late_weight if late else train.mtp_weight
