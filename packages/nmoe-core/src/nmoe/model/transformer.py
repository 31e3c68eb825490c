# SPDX-License-Identifier: Apache-2.0
"""The transformer: embedding, layers of attention and feed-forward, norm, head with loss.

Tokens of all rows of a batch run through the layers as one axis T; rows matter to attention (and to the balance loss)
only. Parameters are master values in fp32 (fp64); every product is in the dtype of the activations, which `train.dtype`
decides where the embedding is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe.comm.communicator import Communicator
from nmoe.comm.local import Local
from nmoe.config import Config
from nmoe.model.attention import Cache, Positions, window_of
from nmoe.model.block import Block
from nmoe.model.functional import Norm, linear
from nmoe.model.mtp import Depth, following, mtp_weight
from nmoe.model.rope import tables
from nmoe.ops import attention
from nmoe.ops.cross_entropy import IGNORED, linear_cross_entropy
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.layer import MoE
from nmoe.rdep.nodes import NodeExchange
from nmoe.rdep.router import Router

__all__ = ["IGNORED", "ModelOutput", "RouterStats", "Transformer", "compute_dtype", "master_dtype"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def compute_dtype(config: Config) -> torch.dtype:
    """Dtype of the activations."""
    return _DTYPES[config.train.dtype]


def master_dtype(config: Config) -> torch.dtype:
    """Dtype of the parameters: never narrower than fp32, because small updates round away in bf16."""
    return torch.promote_types(compute_dtype(config), torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStats:
    """What one MoE layer did in one forward."""

    layer: int
    """Index of the layer in the model."""
    load_E: Tensor
    """int32: tokens that chose each expert."""


class ModelOutput(NamedTuple):
    """Sums, not means: divide ``loss_sum + aux_loss`` by the valid targets of the *global* batch before backward.

    A tuple for FSDP's hooks, see `nmoe.rdep.router.Routes`.
    """

    loss_sum: Tensor
    """Scalar fp32 (fp64): cross entropy in nats, summed over targets that are not IGNORED. Its gradient includes that
    of the head's z-loss and that of multi-token prediction, times its weight."""
    num_targets: Tensor
    """Scalar int64: targets that are not IGNORED."""
    aux_loss: Tensor
    """Scalar: `balance_loss` plus `router_z_loss`, with their gradient."""
    balance_loss: Tensor
    """Scalar without gradient: balance loss of the routers, times its weight, summed over tokens and layers."""
    router_z_loss: Tensor
    """Scalar without gradient: z-loss of the routers, times its weight, summed over tokens and layers."""
    z_loss: Tensor
    """Scalar without gradient: z-loss of the head, times its weight, summed over targets."""
    mtp_loss: Tensor
    """Scalar without gradient: cross entropy of the further tokens of multi-token prediction, in nats, summed over
    their targets and averaged over depths; 0 without it."""
    router_stats: tuple[RouterStats, ...]
    """One per MoE layer, those of multi-token prediction last."""


class Transformer(nn.Module):
    """The model of a config, with uninitialised parameters: fill them by `nmoe.model.init.init_model` or a checkpoint.

    Args:
        config: Decides everything but the values.
        comm: Ranks that share the experts; by default this process holds them all.
    """

    def __init__(self, config: Config, *, comm: Communicator | None = None) -> None:
        super().__init__()
        self.config = config
        model, dtype = config.model, master_dtype(config)
        self.dtype = compute_dtype(config)
        self.embed = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size, dtype=dtype))
        comm = comm or Local()
        self.layers = nn.ModuleList(Block(config, i, comm=comm, dtype=dtype) for i in range(model.num_layers))
        self.norm = Norm(model.hidden_size, eps=model.norm_eps, dtype=dtype)
        depths = range(1, model.mtp_depth + 1)
        self.mtp = nn.ModuleList(Depth(config, depth, comm=comm, dtype=dtype) for depth in depths)
        self.mtp_weight = mtp_weight(config, step=1)
        """Of the further tokens' loss; the trainer sets it anew where its schedule says so."""
        if not model.tie_embeddings:
            self.head = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size, dtype=dtype))

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the output head, which may be the embedding."""
        return self.embed if self.config.model.tie_embeddings else self.head

    def connect(self, exchange: Exchange | NodeExchange) -> None:
        """Let the layers reach the experts of other ranks."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.exchange = exchange

    def routers(self) -> dict[int, Router]:
        """Layer index -> router of each MoE layer; multi-token prediction counts on after the last layer."""
        blocks = [layer for layer in self.layers if isinstance(layer, Block)]
        blocks += [depth.block for depth in self.mtp if isinstance(depth, Depth)]
        return {i: block.moe.router for i, block in enumerate(blocks) if block.moe is not None}

    def _positions(self, positions_BT: Tensor, document_BT: Tensor | None) -> Positions:
        """Everything about the tokens' places that the layers share; without documents no masks, for a cache."""
        width = self.config.attention.qk_rope_head_dim
        wide = torch.promote_types(self.dtype, torch.float32)
        cos_TH, sin_TH = tables(self.config.rope, positions_BT.flatten(), width=width, dtype=wide)
        masks = {}
        if document_BT is not None:
            prepare, device = attention.kernels().prepare, positions_BT.device
            windows = {window_of(self.config, layer) for layer in range(len(self.layers))}
            masks = {window: prepare(document_BT, window=window, device=device) for window in windows}
        return Positions(num_rows=positions_BT.shape[0], cos_TH=cos_TH, sin_TH=sin_TH, masks=masks)

    def _hidden(
        self, tokens_BT: Tensor, at: Positions, caches: Sequence[Cache | None] = ()
    ) -> tuple[Tensor, Tensor, tuple[RouterStats, ...]]:
        """x_TD after the last norm; the routers' losses [2], summed over layers; their loads."""
        x_TD = self._embedded(tokens_BT.flatten())
        aux_sum = torch.zeros(2, dtype=torch.promote_types(self.dtype, torch.float32), device=x_TD.device)
        stats = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches or [None] * len(self.layers), strict=True)):
            x_TD, aux_loss, load_E = layer(x_TD, at, cache)
            if load_E is not None:
                aux_sum = aux_sum + aux_loss
                stats.append(RouterStats(layer=index, load_E=load_E))
        return self.norm(x_TD), aux_sum, tuple(stats)

    def _embedded(self, token_T: Tensor) -> Tensor:
        return F.embedding(token_T, self.embed).to(self.dtype) * self.config.model.embedding_scale

    def _read(self, x_TD: Tensor) -> Tensor:
        """The input of the head."""
        return x_TD * self.config.model.logit_scale

    def forward(
        self, tokens_BT: Tensor, *, positions_BT: Tensor, document_BT: Tensor, targets_BT: Tensor
    ) -> ModelOutput:
        """Loss of a batch of packed rows.

        Args:
            tokens_BT: int64 in [0, V).
            positions_BT: int64: place of each token in its document.
            document_BT: Integers: equal for the tokens of one document, different for neighbours in a row. On the CPU,
                whatever the device, so that nothing waits to learn how many documents there are.
            targets_BT: int64: the next token, or IGNORED where it is padding or belongs to another document.
        """
        at = self._positions(positions_BT, document_BT)
        x_TD, aux_loss, stats = self._hidden(tokens_BT, at)
        target_T = targets_BT.flatten()
        z_weight = self.config.train.z_loss
        loss_sum, z_loss = linear_cross_entropy(self._read(x_TD), self.head_weight, target_T, z_loss=z_weight)
        mtp_loss = torch.zeros_like(loss_sum)
        if self.mtp:
            mtp_loss, mtp_aux, mtp_stats = self._further(x_TD, targets_BT, positions_BT, at)
            loss_sum = loss_sum + self.mtp_weight * (mtp_loss - mtp_loss.detach())  # its gradient, not its value
            aux_loss, stats = aux_loss + mtp_aux, stats + mtp_stats
        return ModelOutput(
            loss_sum=loss_sum,
            num_targets=(target_T != IGNORED).sum(),
            aux_loss=aux_loss.sum(),
            balance_loss=aux_loss[0].detach(),
            router_z_loss=aux_loss[1].detach(),
            z_loss=z_loss,
            mtp_loss=mtp_loss.detach(),
            router_stats=stats,
        )

    def _further(
        self, x_TD: Tensor, targets_BT: Tensor, positions_BT: Tensor, at: Positions
    ) -> tuple[Tensor, Tensor, tuple[RouterStats, ...]]:
        """Cross entropy of the tokens after the next, averaged over depths; the routers' losses, summed; their loads."""
        loss = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=x_TD.device)
        aux_sum = loss.new_zeros(2)
        stats = []
        for index, depth in enumerate(self.mtp, start=len(self.layers)):
            # The token at this depth is the last depth's target; a document that ended has none and reads zeros.
            token_T = targets_BT.flatten()
            embedded_TD = self._embedded(token_T.clamp(min=0))
            embedded_TD = embedded_TD.masked_fill((token_T == IGNORED).unsqueeze(1), 0)
            x_TD, aux_loss, load_E = depth(x_TD, embedded_TD, at)
            targets_BT = following(targets_BT, positions_BT)
            nll, _ = linear_cross_entropy(self._read(x_TD), self.head_weight, targets_BT.flatten())
            loss = loss + nll / len(self.mtp)
            if load_E is not None:
                aux_sum = aux_sum + aux_loss
                stats.append(RouterStats(layer=index, load_E=load_E))
        return loss, aux_sum, tuple(stats)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] in the activations' dtype of rows that are one document each; for short rows only."""
        rows, length = tokens_BT.shape
        positions_BT = torch.arange(length, device=tokens_BT.device).expand(rows, length)
        x_TD, _, _ = self._hidden(
            tokens_BT, self._positions(positions_BT, torch.zeros(rows, length, dtype=torch.int64))
        )
        return linear(self._read(x_TD), self.head_weight).unflatten(0, (rows, length))

    def extend(self, tokens_BT: Tensor, caches: Sequence[Cache], *, past: int) -> Tensor:
        """Logits [B, V] after the last of some more tokens.

        Args:
            tokens_BT: int64: the tokens that follow those in the caches.
            caches: One per layer, extended in place; fresh ones for a prompt.
            past: Tokens in the caches.
        """
        rows, length = tokens_BT.shape
        positions_BT = torch.arange(past, past + length, device=tokens_BT.device).expand(rows, length)
        x_TD, _, _ = self._hidden(tokens_BT, self._positions(positions_BT, None), caches)
        return linear(self._read(x_TD).unflatten(0, (rows, length))[:, -1], self.head_weight)
