# SPDX-License-Identifier: Apache-2.0
"""Muon: every matrix moves by the nearest orthogonal matrix to its momentum, so that all directions move alike.

The orthogonal factor is approached by five Newton-Schulz steps, 15 products of the matrix's own size and nothing else;
its singular values end between 0.7 and 1.2, which is near enough. Scaled by 0.2 sqrt(max(rows, columns)) an update has
the root mean square of AdamW's, so both share learning rate and decay. Momentum is the only state: 4 bytes a parameter
where AdamW keeps 8.

A stack of matrices (experts) is updated in batches. `w13` holds the rows of gate and up in turn; they are two maps that
share an input, published models train them as two, and so they are taken apart here. Of matrices whose rows lie on several
ranks each rank gets a whole one, makes its factor and gives the rows back, so that as many are made at once as there are ranks; a
stack is cut between its matrices, and each rank updates its own.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon (iteration, Nesterov momentum); Liu et al. 2025,
arXiv:2502.16982 section 2.2 (decay and scale).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nmoe.config import Optim
from nmoe.ops import gram
from nmoe.ops.adamw.rounding import noise, round_up_at_random
from nmoe.optim.groups import pace_of
from nmoe.optim.noise import noise_key
from nmoe.pieces import Piece, local

__all__ = ["COEFFICIENTS", "Muon", "join_matrices", "orthogonalize", "split_matrices"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: the steepest odd quintic at 0 that keeps [0, 1] within [0, 1.21]."""
_RMS = 0.2
"""Root mean square of an update, over the learning rate: what AdamW's settles at."""
# Elements orthogonalised at a time: temporaries stay near 1 GiB whatever the number of experts is; and rounded at a time.
_BATCH, _ROUNDED = 1 << 26, 1 << 24


def orthogonalize(matrices: Tensor, *, steps: int) -> Tensor:
    """Nearly the orthogonal polar factor U V^T of each matrix U S V^T.

    Args:
        matrices: [N, rows, columns] in the dtype of the products; not changed. A matrix of zeros stays one.
        steps: Newton-Schulz steps, at least 1.

    Returns:
        The same shape and dtype, with the singular vectors of the argument.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # the products are square in the shorter side
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)  # bounds the largest singular value
    x = (x / norm.clamp(min=torch.finfo(wide).tiny)).to(x.dtype)
    kernels = gram.kernels()
    for _ in range(steps):
        x = torch.baddbmm(x, kernels.quadratic(kernels.gram(x), linear=b, square=c), x, beta=a)
    return x.mT if tall else x


def _rows_by_rank(rows: int, ranks: int) -> list[int]:
    """Rows that each rank holds: FSDP gives each ceil(rows / ranks), the last ones what is left."""
    each = -(-rows // ranks)
    return [max(0, min(each, rows - each * rank)) for rank in range(ranks)]


def split_matrices(name: str, values: Tensor) -> Tensor:
    """[N, rows, columns]: the matrices that a parameter of this name holds; a copy where they lie interleaved."""
    if name.endswith("w13"):
        values = values.unflatten(-2, (-1, 2)).transpose(-3, -2)
    return values.reshape(-1, *values.shape[-2:])


def join_matrices(name: str, matrices: Tensor, like: Tensor) -> Tensor:
    """The inverse of `split_matrices`, in the shape of `like`."""
    if name.endswith("w13"):
        matrices = matrices.unflatten(0, (-1, 2)).transpose(1, 2)
    return matrices.reshape(like.shape)


class Muon:
    """Muon over named matrices and stacks of matrices.

    Args:
        parameters: (name, parameter) pairs, fp32 or fp64, two or three dimensions; plain or sharded tensors.
        config: rates, decay, momentum, steps and the moments' dtype.
        seed: seed of the stochastic rounding of bf16 momentum.
        dtype: of the Newton-Schulz products.
        pieces: by name, which rows of a parameter these are; one that is not named is whole.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        config: Optim,
        seed: int,
        dtype: torch.dtype,
        pieces: Mapping[str, Piece] = MappingProxyType({}),
    ):
        self._parameters = dict(parameters)
        self._offset = {name: pieces[name].offset if name in pieces else 0 for name in self._parameters}
        self._config, self._seed, self._dtype = config, seed, dtype
        self.num_updates = 0
        narrow = config.moment_dtype == "bf16"
        self._momentum = {
            name: torch.zeros_like(local(p), dtype=torch.bfloat16 if narrow else p.dtype, requires_grad=False)
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def step(self, *, learning_rate: float, scale: float = 1.0) -> None:
        """Updates every parameter from its gradient times `scale`; one without a gradient is left as it is."""
        self.num_updates += 1
        apart: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            if scale != 1.0:
                local(parameter.grad).mul_(scale)
            update = self._look_ahead(name, parameter.grad)
            if isinstance(parameter, DTensor) and parameter.ndim == 2:
                apart[name] = update.to(self._dtype)
            else:
                self._move(name, self._factor(name, update), learning_rate=learning_rate)
        for name, factor in self._factors_of_rows(apart):
            self._move(name, factor, learning_rate=learning_rate)

    def _look_ahead(self, name: str, gradient: Tensor) -> Tensor:
        """Takes the gradient into the momentum; returns, of this rank's rows, what it will be if the next one is the same."""
        beta, momentum, mine = self._config.momentum, self._momentum[name], local(gradient)
        if momentum.dtype == torch.bfloat16:
            moved = momentum.to(mine.dtype).mul_(beta).add_(mine)
            self._round(name, moved)
        else:
            moved = momentum.mul_(beta).add_(mine)
        return torch.add(mine, moved, alpha=beta)

    def _round(self, name: str, moved: Tensor) -> None:
        """Keeps the momentum in bf16, a part at a time."""
        key, offset = noise_key(self._seed, update=self.num_updates, name=name), self._offset[name]
        parts = (tensor.view(-1).split(_ROUNDED) for tensor in (moved, self._momentum[name]))
        for values, kept in zip(*parts, strict=True):
            bits = noise(key, offset=offset, count=len(values), device=values.device)
            kept.copy_(round_up_at_random(values.float(), bits))
            offset += len(values)

    def _factors_of_rows(self, updates: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of each matrix's factor, from its rows of each matrix; matrices of like size go together."""
        names = sorted(updates, key=lambda name: (-self._parameters[name].numel(), name))
        while names:
            ranks = cast(DTensor, self._parameters[names[0]]).device_mesh
            batch, names = names[: ranks.size()], names[ranks.size() :]
            yield from zip(batch, self._exchange([updates[name] for name in batch], batch, ranks), strict=True)

    def _exchange(self, rows: list[Tensor], names: list[str], ranks: DeviceMesh) -> list[Tensor]:
        """Rank r collects the rows of matrix r from all ranks, makes its factor, and gives each rank its rows of it."""
        size, rank, group = ranks.size(), ranks.get_local_rank(), ranks.get_group()
        sent = [part.numel() for part in rows] + [0] * (size - len(rows))
        name = names[rank] if rank < len(names) else None
        shape = self._parameters[name].shape if name else torch.Size((0, 0))
        received = [count * shape[1] for count in _rows_by_rank(shape[0], size)]
        whole = rows[0].new_empty(shape)
        dist.all_to_all_single(whole.view(-1), torch.cat([part.flatten() for part in rows]), received, sent, group)
        factor = self._factor(name, whole) if name else whole
        back = rows[0].new_empty(sum(sent))
        dist.all_to_all_single(back, factor.reshape(-1), sent, received, group)
        return [part.view_as(like) for part, like in zip(back.split(sent), rows, strict=False)]

    def _factor(self, name: str, update: Tensor) -> Tensor:
        """The orthogonal factor of a matrix, or of each matrix of a stack, in the shape of `update`, which is overwritten."""
        matrices = split_matrices(name, update)
        for part in matrices.split(max(1, _BATCH // math.prod(matrices.shape[-2:]))):
            part.copy_(orthogonalize(part.to(self._dtype), steps=self._config.newton_schulz_steps))
        return join_matrices(name, matrices, update)

    def _move(self, name: str, factor: Tensor, *, learning_rate: float) -> None:
        """One decoupled decay and one orthogonal step of this rank's rows of a parameter."""
        parameter = self._parameters[name]
        value, pace = local(parameter), pace_of(name, parameter.ndim, config=self._config)
        rows = parameter.shape[-2] // (2 if name.endswith("w13") else 1)
        value.mul_(1.0 - learning_rate * pace.rate * pace.decay)
        value.add_(factor, alpha=-learning_rate * pace.rate * _RMS * math.sqrt(max(rows, parameter.shape[-1])))

    def state(self) -> dict[str, Tensor]:
        """The momentum by name, as it is, not copied."""
        return {f"{name}.momentum": momentum for name, momentum in self._momentum.items()}
