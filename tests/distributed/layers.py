# SPDX-License-Identifier: Apache-2.0
"""Routed experts on several ranks and on one, on equal data: what the tests of the protocol compare."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import deterministic

from nmoe.comm.shm import Shm
from nmoe.rdep.exchange import Exchange
from nmoe.rdep.layer import experts_across
from nmoe.rdep.nodes import NodeExchange, exchange_over
from nmoe.rdep.one_rank import ExpertsHere

__all__ = ["Case", "Figures", "Problem", "across", "error_of", "gradients", "on_one_rank", "on_ranks", "poison"]

Figures = dict[str, Tensor]
"""Outputs and gradients by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layer, its tokens, and the way that they are routed."""

    tokens: tuple[int, ...]
    """T of each rank."""
    experts: int = 16
    top_k: int = 2
    width: int = 64
    expert_width: int = 12
    dtype: torch.dtype = torch.float64
    routing: Literal["random", "few", "one expert", "one rank"] = "random"
    """few: a third of the experts gets nothing. one expert: it is among every token's choices."""
    capacity: float = 2.0
    exact: bool = False
    keep: bool = True
    """Pre-activations for backward."""
    node_size: int = 0
    """Ranks of a node; 0: all are of one."""

    @property
    def ranks(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Data of a case: of all ranks together, or of one."""

    x_TD: Tensor
    gate_TK: Tensor
    expert_TK: Tensor
    w13_X2FD: Tensor
    w2_XDF: Tensor
    dout_TD: Tensor

    @classmethod
    def of(cls, case: Case, salt: int = 0) -> "Problem":
        """All ranks' data, the same for every caller."""
        plain = replace(case, dtype=torch.float64, node_size=0)
        random = torch.Generator().manual_seed(zlib.crc32(repr(plain).encode()) + salt)
        T, E, D, F, K = sum(case.tokens), case.experts, case.width, case.expert_width, case.top_k

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        score_TE, share = torch.rand(T, E, generator=random), E // case.ranks
        if case.routing == "few":
            score_TE[:, ::3] = -1
        elif case.routing == "one expert":
            score_TE[:, E // 2 + 1] = 2
        elif case.routing == "one rank":
            score_TE[:, -share:] += 2
        problem = cls(
            x_TD=normal(T, D),
            gate_TK=normal(T, K),
            expert_TK=score_TE.topk(K).indices.to(torch.int32),
            w13_X2FD=normal(E, 2 * F, D) / D**0.5,
            w2_XDF=normal(E, D, F) / F**0.5,
            dout_TD=normal(T, D),
        )
        gate_dtype = torch.promote_types(case.dtype, torch.float32)
        wide = {name: getattr(problem, name).to(gate_dtype) for name in ("gate_TK", "w13_X2FD", "w2_XDF")}
        rows = {name: getattr(problem, name).to(case.dtype) for name in ("x_TD", "dout_TD")}
        return replace(problem, **wide, **rows)

    def of_rank(self, case: Case, rank: int) -> "Problem":
        """The tokens and the experts of one rank."""
        first, share = sum(case.tokens[:rank]), case.experts // case.ranks
        mine, owned = slice(first, first + case.tokens[rank]), slice(rank * share, (rank + 1) * share)
        rows = {name: getattr(self, name)[mine] for name in ("x_TD", "gate_TK", "expert_TK", "dout_TD")}
        return Problem(**rows, w13_X2FD=self.w13_X2FD[owned], w2_XDF=self.w2_XDF[owned])

    def doubled(self) -> "Problem":
        """The same in fp64: whatever it holds was rounded before."""
        names = ("x_TD", "gate_TK", "w13_X2FD", "w2_XDF", "dout_TD")
        return replace(self, **{name: getattr(self, name).double() for name in names})


def gradients(problem: Problem, layer: Callable[..., Tensor]) -> Figures:
    """Output of `layer(x, gate, w13, w2, expert)` and the gradients of its four operands."""
    names = ("x_TD", "gate_TK", "w13_X2FD", "w2_XDF")
    leaves = [getattr(problem, name).clone().requires_grad_() for name in names]
    out_TD = layer(*leaves, problem.expert_TK)
    grads = torch.autograd.grad(out_TD, leaves, problem.dout_TD)
    return {"out_TD": out_TD.detach()} | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


def on_one_rank(problem: Problem) -> Figures:
    """The truth: all tokens and all experts on one rank, in fp64."""
    return gradients(problem.doubled(), ExpertsHere.apply)


def across(exchange: Exchange | NodeExchange, layer: int = 0, *, keep: bool = True) -> Callable[..., Tensor]:
    """The layer over an exchange."""
    return lambda *operands: experts_across(exchange).apply(*operands, keep, exchange, layer)


def on_ranks(
    cases: list[Case], work: Callable[[Exchange | NodeExchange, Case], list[Figures]] | None = None
) -> list[list[Figures]]:
    """On each rank: the figures of this rank for each case, with every byte poisoned that nobody wrote.

    Args:
        cases: For as many ranks as there are.
        work: What to compute; by default one forward and backward.
    """
    torch._C._set_deterministic_algorithms(True)  # as torch.use_deterministic_algorithms, without importing Inductor
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  new tensors are full of NaN
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    found = []
    for case in cases:
        comm = Shm(dist.group.WORLD, node_size=case.node_size)
        exchange = exchange_over(
            comm,
            tokens=max(case.tokens),
            hidden_size=case.width,
            num_experts=case.experts,
            top_k=case.top_k,
            dtype=case.dtype,
            capacity=case.capacity,
            exact=case.exact,
            timeout_s=60.0,
        )
        poison(exchange)
        comm.barrier()
        found.append((work or once)(exchange, case))
        comm.close()
    return found


def once(exchange: Exchange | NodeExchange, case: Case) -> list[Figures]:
    """One forward and backward of this rank's part."""
    return [gradients(Problem.of(case).of_rank(case, exchange.comm.rank), across(exchange, keep=case.keep))]


def poison(exchange: Exchange | NodeExchange) -> None:
    """Fill this rank's symmetric memory with NaN, and with records that no one sent."""
    for part in (exchange.rail, exchange.node) if isinstance(exchange, NodeExchange) else (exchange,):
        areas = [area.local for area in (part.rows, part.gradients, part.results, part.values)]
        for area in (*areas, *part.outboxes):
            area.fill_(float("nan") if area.is_floating_point() else -0x7654321)
        part.records.local.fill_(-0x7654321)
        part.count.local.fill_(0x7FFFFFF)


def error_of(parts: list[Figures], truth: Figures) -> dict[str, float]:
    """Largest difference of the ranks' parts, laid end to end, from the truth, relative to its largest number."""
    errors = {}
    for name, expected in truth.items():
        found = torch.cat([part[name] for part in parts]).double()
        assert found.shape == expected.shape, name
        assert found.isfinite().all(), f"{name} holds what nobody wrote"
        scale = expected.abs().max().item() if expected.numel() else 0.0
        errors[name] = ((found - expected).abs().max().item() / scale) if scale else found.abs().sum().item()
    return errors
