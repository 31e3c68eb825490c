# SPDX-License-Identifier: Apache-2.0
"""The transformer: embedding, layers of attention and feed-forward, norm, head with loss.

Tokens of all rows of a batch run through the layers as one axis T; rows matter to attention (and to the balance loss)
only. Parameters are master values in fp32 (fp64); every product is in the dtype of the activations, which `train.dtype`
decides where the embedding is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe.comm.communicator import Communicator
from nmoe.comm.local import Local
from nmoe.config import Config
from nmoe.model.attention import Cache, Positions, attention_of, window_of
from nmoe.model.functional import Norm, linear
from nmoe.model.mlp import MLP
from nmoe.model.rope import tables
from nmoe.ops import attention
from nmoe.ops.cross_entropy import IGNORED, linear_cross_entropy
from nmoe.rdep.layer import MoE
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
    load_E: Tensor  # noqa: N815
    """int32: tokens that chose each expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutput:
    """Sums, not means: divide ``loss_sum + aux_loss`` by the valid targets of the *global* batch before backward."""

    loss_sum: Tensor
    """Scalar fp32 (fp64): cross entropy in nats, summed over targets that are not IGNORED. Its gradient includes that
    of the head's z-loss."""
    num_targets: Tensor
    """Scalar int64: targets that are not IGNORED."""
    aux_loss: Tensor
    """Scalar: balance and z-losses of the routers, times their weights, summed over tokens and layers."""
    z_loss: Tensor
    """Scalar without gradient: z-loss of the head, times its weight, summed over targets."""
    router_stats: tuple[RouterStats, ...]
    """One per MoE layer."""


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: Config, index: int, *, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        model, moe = config.model, config.moe
        D = model.hidden_size
        self.attn_norm = Norm(D, eps=model.norm_eps, dtype=dtype)
        self.attn = attention_of(config, index, dtype=dtype)
        self.ffn_norm = Norm(D, eps=model.norm_eps, dtype=dtype)
        if index < model.num_dense_layers:
            self.mlp, self.moe = MLP(hidden_size=D, ffn_size=model.ffn_size, dtype=dtype), None
        else:
            width = moe.num_shared_experts * moe.expert_size
            shared = MLP(hidden_size=D, ffn_size=width, dtype=dtype) if width else None
            self.mlp, self.moe = None, MoE(hidden_size=D, config=moe, comm=comm, shared=shared, dtype=dtype)

    def forward(
        self, x_TD: Tensor, at: Positions, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x_TD after the layer; the router's loss and load_E, None where the layer is dense."""
        normed_TD = self.attn_norm(x_TD)
        x_TD = x_TD + (self.attn(normed_TD, at) if cache is None else self.attn.extend(normed_TD, at, cache))
        normed_TD = self.ffn_norm(x_TD)
        if self.moe is None:
            assert self.mlp is not None
            return x_TD + self.mlp(normed_TD), None, None
        out_TD, aux_loss, load_E = self.moe(normed_TD, at.num_rows)
        return x_TD + out_TD, aux_loss, load_E


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
        if not model.tie_embeddings:
            self.head = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size, dtype=dtype))

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the output head, which may be the embedding."""
        return self.embed if self.config.model.tie_embeddings else self.head

    def routers(self) -> dict[int, Router]:
        """Layer index -> router of each MoE layer."""
        blocks = (layer for layer in self.layers if isinstance(layer, Block))
        return {i: block.moe.router for i, block in enumerate(blocks) if block.moe is not None}

    def _positions(self, positions_BT: Tensor, document_BT: Tensor | None) -> Positions:
        """Everything about the tokens' places that the layers share; without documents no masks, for a cache."""
        width = self.config.attention.qk_rope_head_dim
        wide = torch.promote_types(self.dtype, torch.float32)
        cos_TH, sin_TH = tables(self.config.rope, positions_BT.flatten(), width=width, dtype=wide)
        masks = {}
        if document_BT is not None:
            windows = {window_of(self.config, layer) for layer in range(len(self.layers))}
            masks = {window: attention.kernels().prepare(document_BT, window=window) for window in windows}
        return Positions(num_rows=positions_BT.shape[0], cos_TH=cos_TH, sin_TH=sin_TH, masks=masks)

    def _hidden(
        self, tokens_BT: Tensor, at: Positions, caches: Sequence[Cache | None] = ()
    ) -> tuple[Tensor, Tensor, tuple[RouterStats, ...]]:
        """x_TD after the last norm; the routers' losses, summed; their loads."""
        x_TD = F.embedding(tokens_BT.flatten(), self.embed).to(self.dtype)
        aux_sum = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=x_TD.device)
        stats = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches or [None] * len(self.layers), strict=True)):
            x_TD, aux_loss, load_E = layer(x_TD, at, cache)
            if load_E is not None:
                aux_sum = aux_sum + aux_loss
                stats.append(RouterStats(layer=index, load_E=load_E))
        return self.norm(x_TD), aux_sum, tuple(stats)

    def forward(
        self, tokens_BT: Tensor, *, positions_BT: Tensor, document_BT: Tensor, targets_BT: Tensor
    ) -> ModelOutput:
        """Loss of a batch of packed rows.

        Args:
            tokens_BT: int64 in [0, V).
            positions_BT: int64: place of each token in its document.
            document_BT: Integers: equal for the tokens of one document, different for neighbours in a row.
            targets_BT: int64: the next token, or IGNORED where it is padding or belongs to another document.
        """
        x_TD, aux_loss, stats = self._hidden(tokens_BT, self._positions(positions_BT, document_BT))
        target_T = targets_BT.flatten()
        loss_sum, z_loss = linear_cross_entropy(x_TD, self.head_weight, target_T, z_loss=self.config.train.z_loss)
        return ModelOutput(
            loss_sum=loss_sum,
            num_targets=(target_T != IGNORED).sum(),
            aux_loss=aux_loss,
            z_loss=z_loss,
            router_stats=stats,
        )

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] in the activations' dtype of rows that are one document each; for short rows only."""
        rows, length = tokens_BT.shape
        positions_BT = torch.arange(length, device=tokens_BT.device).expand(rows, length)
        x_TD, _, _ = self._hidden(tokens_BT, self._positions(positions_BT, torch.zeros_like(tokens_BT)))
        return linear(x_TD, self.head_weight).unflatten(0, (rows, length))

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
        return linear(x_TD.unflatten(0, (rows, length))[:, -1], self.head_weight)
