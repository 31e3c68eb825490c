# SPDX-License-Identifier: Apache-2.0
"""Attention of two kinds: multi-head latent (MLA) and grouped queries (GQA), global or in a sliding window.

MLA makes the keys and values of all heads from one narrow latent vector per token, so that generation keeps only the
latent (L numbers) and one rotated key (H numbers): 576 a token and layer in DeepSeek-V3 where plain attention of its
size keeps 40960. Training expands them; generation moves the expansion over to the query and never does.

Source: DeepSeek-V2 (arXiv 2405.04434, 2.1); GQA (arXiv 2305.13245); norms on query and key heads: Qwen3 (arXiv
2505.09388, 2).
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmoe.config import Config
from nmoe.model.functional import Norm, linear
from nmoe.model.rope import softmax_factor
from nmoe.ops import attention
from nmoe.ops.heads import join_heads
from nmoe.ops.rope import rope

__all__ = ["GQA", "MLA", "Attention", "Cache", "Positions", "attention_of", "window_of"]

_LATENT_EPS = 1e-6
"""The published models norm their latents with this, whatever their other norms use (Moonlight: 1e-5)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """Where the tokens of a forward stand; the same for all layers."""

    num_rows: int
    """B; the tokens are B rows of T / B."""
    cos_TH: Tensor
    sin_TH: Tensor
    masks: Mapping[int, Any]
    """Window -> what the attention op prepared for it from the documents; empty where a cache is extended."""


@dataclass(kw_only=True, slots=True)
class Cache:
    """What one layer keeps of the tokens so far, for generation: [B, T, ...] each, growing along T."""

    kept: tuple[Tensor, ...] = ()

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append tokens; returns everything kept."""
        self.kept = tuple(torch.cat(pair, dim=1) for pair in zip(self.kept, new, strict=True)) if self.kept else new
        return self.kept


def window_of(config: Config, layer: int) -> int:
    """Tokens that a query of a layer sees; 0 for all."""
    a = config.attention
    last = layer >= config.model.num_layers - 1  # and the layers of multi-token prediction behind it
    is_global = last or (a.global_every > 0 and (layer + 1) % a.global_every == 0)
    return 0 if is_global else a.window


def _weights(scores_BNTT: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """Softmax over the keys that a query may see; the queries are the last of the keys' tokens."""
    queries, keys = scores_BNTT.shape[-2:]
    key = torch.arange(keys, device=scores_BNTT.device)
    distance = key[keys - queries :].unsqueeze(1) - key
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    scores_BNTT = scores_BNTT.to(torch.promote_types(dtype, torch.float32)).masked_fill(hidden, float("-inf"))
    return torch.softmax(scores_BNTT, dim=-1).to(dtype)


class Attention(nn.Module):
    """What both kinds share: widths, scale, window, output projection.

    Args:
        config: Sections [model], [attention] and [rope].
        layer: Index of the layer.
        dtype: Of the master values.
    """

    def __init__(self, config: Config, layer: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        a = config.attention
        self.heads, self.nope, self.rotated, self.v_width = (
            a.num_heads,
            a.qk_nope_head_dim,
            a.qk_rope_head_dim,
            a.v_head_dim,
        )
        self.scale = a.qk_head_dim**-0.5 * softmax_factor(config.rope)
        self.window = window_of(config, layer)
        self.dtype = dtype
        self.wo = self._weight(config.model.hidden_size, a.num_heads * a.v_head_dim)

    def _weight(self, out_width: int, in_width: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(out_width, in_width, dtype=self.dtype))

    @abstractmethod
    def _expand(self, x_TD: Tensor, at: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """q_TNH, k_TGH and v_TGH of the tokens, rotated."""

    @abstractmethod
    def extend(self, x_TD: Tensor, at: Positions, cache: Cache) -> Tensor:
        """out_TD of tokens that follow those in the cache, which they join. Rows are one document each."""

    def forward(self, x_TD: Tensor, at: Positions) -> Tensor:
        """out_TD: what each token reads from the tokens of its document up to itself."""
        q, k, v = (t.unflatten(0, (at.num_rows, -1)) for t in self._expand(x_TD, at))
        out_BTNH = attention.kernels().attention(q, k, v, at.masks[self.window], scale=self.scale)
        return linear(out_BTNH.flatten(2).flatten(0, 1), self.wo)


class MLA(Attention):
    """Multi-head latent attention."""

    def __init__(self, config: Config, layer: int, *, dtype: torch.dtype) -> None:
        super().__init__(config, layer, dtype=dtype)
        a, D = config.attention, config.model.hidden_size
        self.q_rank = a.q_lora_rank
        if a.q_lora_rank:
            self.wq_a = self._weight(a.q_lora_rank, D)
            self.q_norm = Norm(a.q_lora_rank, eps=_LATENT_EPS, dtype=dtype)
        self.wq = self._weight(a.num_heads * a.qk_head_dim, a.q_lora_rank or D)
        self.wkv_a = self._weight(a.kv_lora_rank + a.qk_rope_head_dim, D)
        self.kv_norm = Norm(a.kv_lora_rank, eps=_LATENT_EPS, dtype=dtype)
        self.wkv_b = self._weight(a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)

    def _queries(self, x_TD: Tensor) -> Tensor:
        """q_TNH, not yet rotated."""
        latent_TL = self.q_norm(linear(x_TD, self.wq_a)) if self.q_rank else x_TD
        return linear(latent_TL, self.wq).unflatten(-1, (self.heads, -1))

    def _latents(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Normed latent_TL, and the key_TH that all heads share, not yet rotated."""
        latent_TL, key_TH = linear(x_TD, self.wkv_a).split((self.wkv_b.shape[1], self.rotated), dim=-1)
        return self.kv_norm(latent_TL), key_TH

    def _expand(self, x_TD: Tensor, at: Positions) -> tuple[Tensor, Tensor, Tensor]:
        latent_TL, shared_TH = self._latents(x_TD)
        kv_TNH = linear(latent_TL, self.wkv_b).unflatten(-1, (self.heads, -1))
        return join_heads(self._queries(x_TD), kv_TNH, shared_TH, at.cos_TH, at.sin_TH)

    def extend(self, x_TD: Tensor, at: Positions, cache: Cache) -> Tensor:
        """See `Attention`; scores and sums are taken in the latent space, keys and values are never made."""
        latent_TL, shared_TH = self._latents(x_TD)
        shared_TH, q_TNH = (
            rope(t, at.cos_TH, at.sin_TH, interleaved=True) for t in (shared_TH.unsqueeze(1), self._queries(x_TD))
        )
        new = (t.unflatten(0, (at.num_rows, -1)) for t in (latent_TL, shared_TH.squeeze(1)))
        latent_BTL, shared_BTH = cache.extend(*new)
        q_BTNH = q_TNH.unflatten(0, (at.num_rows, -1))
        q_nope, q_rotated = q_BTNH.split((self.nope, self.rotated), dim=-1)
        up_NHL = self.wkv_b.to(x_TD.dtype).unflatten(0, (self.heads, -1))
        k_up_NHL, v_up_NHL = up_NHL.split((self.nope, self.v_width), dim=1)

        q_BNTL = torch.einsum("btnh,nhl->bntl", q_nope, k_up_NHL)
        scores = q_BNTL @ latent_BTL.unsqueeze(1).mT + q_rotated.transpose(1, 2) @ shared_BTH.unsqueeze(1).mT
        read_BNTL = _weights(scores * self.scale, self.window, x_TD.dtype) @ latent_BTL.unsqueeze(1)
        out_BTNH = torch.einsum("bntl,nhl->btnh", read_BNTL, v_up_NHL)
        return linear(out_BTNH.flatten(2).flatten(0, 1), self.wo)


class GQA(Attention):
    """Attention whose query heads share key/value heads."""

    def __init__(self, config: Config, layer: int, *, dtype: torch.dtype) -> None:
        super().__init__(config, layer, dtype=dtype)
        a, D = config.attention, config.model.hidden_size
        self.kv_heads = a.num_kv_heads
        self.wq = self._weight(a.num_heads * a.qk_head_dim, D)
        self.wk = self._weight(a.num_kv_heads * a.qk_head_dim, D)
        self.wv = self._weight(a.num_kv_heads * a.v_head_dim, D)
        self.q_norm = Norm(a.qk_head_dim, eps=config.model.norm_eps, dtype=dtype) if a.qk_norm else nn.Identity()
        self.k_norm = Norm(a.qk_head_dim, eps=config.model.norm_eps, dtype=dtype) if a.qk_norm else nn.Identity()

    def _expand(self, x_TD: Tensor, at: Positions) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH = self.q_norm(linear(x_TD, self.wq).unflatten(-1, (self.heads, -1)))
        k_TGH = self.k_norm(linear(x_TD, self.wk).unflatten(-1, (self.kv_heads, -1)))
        v_TGH = linear(x_TD, self.wv).unflatten(-1, (self.kv_heads, -1))
        q_TNH, k_TGH = (rope(t, at.cos_TH, at.sin_TH, interleaved=False) for t in (q_TNH, k_TGH))
        return q_TNH, k_TGH, v_TGH

    def extend(self, x_TD: Tensor, at: Positions, cache: Cache) -> Tensor:
        """See `Attention`."""
        q_BTNH, k_BTGH, v_BTGH = (t.unflatten(0, (at.num_rows, -1)) for t in self._expand(x_TD, at))
        k_BTGH, v_BTGH = cache.extend(k_BTGH, v_BTGH)
        shared = self.heads // self.kv_heads
        k_BNTH, v_BNTH = (t.transpose(1, 2).repeat_interleave(shared, dim=1) for t in (k_BTGH, v_BTGH))
        scores = q_BTNH.transpose(1, 2) @ k_BNTH.mT * self.scale
        out_BNTH = _weights(scores, self.window, x_TD.dtype) @ v_BNTH
        return linear(out_BNTH.transpose(1, 2).flatten(2).flatten(0, 1), self.wo)


def attention_of(config: Config, layer: int, *, dtype: torch.dtype) -> Attention:
    """The attention of a layer."""
    kind = MLA if config.attention.kind == "mla" else GQA
    return kind(config, layer, dtype=dtype)
