# SPDX-License-Identifier: Apache-2.0
"""Plain torch meaning of the router. The choice is a stable sort, so that equal scores go to the lowest expert id."""

import torch
from torch import Tensor

from nmoe.ops.route_topk import Routing

__all__ = ["project", "project_backward", "route", "route_backward"]

_TINY = 1e-20  # keeps 0/0 out of the normalisation where all K scores underflow; DeepSeek-V3 has the same


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def project(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    wide = _wide(x_TD)
    return x_TD.to(wide) @ weight_ED.to(wide).t()


def project_backward(dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, dx_TD: Tensor) -> tuple[Tensor, Tensor]:
    wide = dlogits_TE.dtype
    dx_TD = dx_TD.to(wide) + dlogits_TE @ weight_ED.to(wide)
    dweight_ED = dlogits_TE.t() @ x_TD.to(wide)
    return dx_TD.to(x_TD.dtype), dweight_ED.to(weight_ED.dtype)


def _scores(logits_TE: Tensor, scoring: str) -> Tensor:
    return torch.sigmoid(logits_TE) if scoring == "sigmoid" else torch.softmax(logits_TE, dim=-1)


def _best(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest along the last axis, falling; ties to the lowest index."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]


def _limit_groups(choice_TE: Tensor, routing: Routing) -> Tensor:
    """choice_TE with every expert outside the best groups at -inf."""
    tokens, experts = choice_TE.shape
    grouped = choice_TE.view(tokens, routing.num_groups, experts // routing.num_groups)
    members = 2 if routing.group_score == "top2_sum" else 1
    score = grouped.topk(min(members, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    keep = torch.zeros_like(score, dtype=torch.bool).scatter_(1, _best(score, routing.top_k_groups), True)
    return grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).view(tokens, experts)


def route(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    scores_TE = _scores(logits_TE, routing.scoring)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    if routing.top_k_groups < routing.num_groups:
        choice_TE = _limit_groups(choice_TE, routing)
    expert_TK = _best(choice_TE, routing.top_k)
    gate_TK = scores_TE.gather(1, expert_TK)
    if routing.normalize:
        gate_TK = gate_TK / (gate_TK.sum(dim=-1, keepdim=True) + _TINY)
    load_E = torch.zeros(logits_TE.shape[1], dtype=torch.int32, device=logits_TE.device)
    load_E.index_add_(0, expert_TK.reshape(-1), load_E.new_ones(()).expand(expert_TK.numel()))
    return expert_TK.to(torch.int32), gate_TK * routing.scale, load_E


def route_backward(dgate_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, routing: Routing) -> Tensor:
    scores_TE = _scores(logits_TE, routing.scoring)
    expert_TK = expert_TK.to(torch.int64)
    dscore_TK = dgate_TK * routing.scale
    if routing.normalize:
        chosen_TK = scores_TE.gather(1, expert_TK)
        total_T1 = chosen_TK.sum(dim=-1, keepdim=True) + _TINY
        mean_T1 = (dscore_TK * chosen_TK).sum(dim=-1, keepdim=True) / total_T1
        dscore_TK = (dscore_TK - mean_T1) / total_T1
    dscore_TE = torch.zeros_like(scores_TE).scatter_(1, expert_TK, dscore_TK)  # a token's K experts differ
    if routing.scoring == "sigmoid":
        return dscore_TE * scores_TE * (1 - scores_TE)
    return scores_TE * (dscore_TE - (dscore_TE * scores_TE).sum(dim=-1, keepdim=True))
