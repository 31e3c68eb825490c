# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: keys and values of all heads come from one narrow latent vector per token.

Only the latent (L numbers) and one rotated key shared by all heads (H numbers) would have to be cached: 576 numbers a
token in DeepSeek-V3 where plain attention of its size needs 40960. In training the keys and values are expanded.

Source: DeepSeek-V2 (arXiv 2405.04434, 2.1).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmoe.config import Config
from nmoe.model.functional import Norm, linear
from nmoe.model.rope import softmax_factor
from nmoe.ops import attention
from nmoe.ops.rope import rope

__all__ = ["MLA", "Positions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """Where the tokens of a forward stand; the same for all layers."""

    num_rows: int
    """B; the tokens are B rows of T / B."""
    cos_TH: Tensor  # noqa: N815
    sin_TH: Tensor  # noqa: N815
    mask: Any
    """What the attention op prepared from the documents."""


class MLA(nn.Module):
    """Multi-head latent attention.

    Args:
        config: Sections [model], [attention] and [rope].
        dtype: Of the master values.
    """

    def __init__(self, config: Config, *, dtype: torch.dtype) -> None:
        super().__init__()
        a, D, eps = config.attention, config.model.hidden_size, config.model.norm_eps
        self.heads, self.nope, self.rotated, self.v_width = (
            a.num_heads,
            a.qk_nope_head_dim,
            a.qk_rope_head_dim,
            a.v_head_dim,
        )
        self.scale = a.qk_head_dim**-0.5 * softmax_factor(config.rope)

        def weight(out_width: int, in_width: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(out_width, in_width, dtype=dtype))

        self.q_rank = a.q_lora_rank
        if a.q_lora_rank:
            self.wq_a = weight(a.q_lora_rank, D)
            self.q_norm = Norm(a.q_lora_rank, eps=eps, dtype=dtype)
        self.wq = weight(a.num_heads * a.qk_head_dim, a.q_lora_rank or D)
        self.wkv_a = weight(a.kv_lora_rank + a.qk_rope_head_dim, D)
        self.kv_norm = Norm(a.kv_lora_rank, eps=eps, dtype=dtype)
        self.wkv_b = weight(a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
        self.wo = weight(D, a.num_heads * a.v_head_dim)

    def _queries(self, x_TD: Tensor, at: Positions) -> Tensor:
        """q_TNH, its last columns rotated."""
        latent_TL = self.q_norm(linear(x_TD, self.wq_a)) if self.q_rank else x_TD
        q_TNH = linear(latent_TL, self.wq).unflatten(-1, (self.heads, -1))
        return rope(q_TNH, at.cos_TH, at.sin_TH, interleaved=True)

    def _latents(self, x_TD: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
        """Normed latent_TL and rotated key_TH that all heads share."""
        latent_TL, key_TH = linear(x_TD, self.wkv_a).split((self.wkv_b.shape[1], self.rotated), dim=-1)
        key_TH = rope(key_TH.unsqueeze(1), at.cos_TH, at.sin_TH, interleaved=True).squeeze(1)
        return self.kv_norm(latent_TL), key_TH

    def forward(self, x_TD: Tensor, at: Positions) -> Tensor:
        """out_TD: what each token reads from the tokens of its document up to itself."""
        q_TNH = self._queries(x_TD, at)
        latent_TL, shared_TH = self._latents(x_TD, at)
        kv_TNH = linear(latent_TL, self.wkv_b).unflatten(-1, (self.heads, -1))
        k_TNH, v_TNH = kv_TNH.split((self.nope, self.v_width), dim=-1)
        k_TNH = torch.cat((k_TNH, shared_TH.unsqueeze(1).expand(-1, self.heads, -1)), dim=-1)

        q, k, v = (t.unflatten(0, (at.num_rows, -1)) for t in (q_TNH, k_TNH, v_TNH))
        out_BTNH = attention.kernels().attention(q, k, v, at.mask, scale=self.scale)
        return linear(out_BTNH.flatten(2).flatten(0, 1), self.wo)
