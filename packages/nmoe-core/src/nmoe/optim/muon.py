# SPDX-License-Identifier: Apache-2.0
"""Muon: every matrix moves by the nearest orthogonal matrix to its momentum, so that all directions move alike.

The orthogonal factor is approached by five Newton-Schulz steps, 15 products of the matrix's own size and nothing else;
its singular values end between 0.7 and 1.2, which is near enough. Scaled by 0.2 sqrt(max(rows, columns)) an update has
the root mean square of AdamW's, so both share learning rate and decay. Momentum is the only state: 4 bytes a parameter
where AdamW keeps 8.

A stack of matrices (experts) is updated in batches. `w13` holds the rows of gate and up in turn; they are two maps that
share an input, published models train them as two, and so they are taken apart here. A matrix whose rows lie on several
ranks is gathered for its products and cut again, and all these ranks compute the same factor; a stack is cut between
its matrices, and each rank updates its own.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon (iteration, Nesterov momentum); Liu et al. 2025,
arXiv:2502.16982 section 2.2 (decay and scale).
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from nmoe.config import Optim
from nmoe.optim.adamw import mixed_seed, round_stochastically
from nmoe.optim.groups import pace_of
from nmoe.pieces import local

__all__ = ["COEFFICIENTS", "Muon", "join_matrices", "orthogonalize", "split_matrices"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: the steepest odd quintic at 0 that keeps [0, 1] within [0, 1.21]."""
_RMS = 0.2
"""Root mean square of an update, over the learning rate: what AdamW's settles at."""
# Elements orthogonalised at a time: temporaries stay near 1 GiB whatever the number of experts is.
_BATCH = 1 << 26


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
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _whole(mine: Tensor, parameter: Tensor) -> Tensor:
    """All rows of whose this rank has some; of a stack that is cut between its matrices, what is here is whole."""
    if not isinstance(parameter, DTensor) or parameter.ndim > 2:
        return mine
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(mine, mesh, placements, shape=parameter.shape, stride=parameter.stride()).full_tensor()


def _part(whole: Tensor, parameter: Tensor) -> Tensor:
    """What of a whole tensor belongs to this rank."""
    if not isinstance(parameter, DTensor) or parameter.ndim > 2:
        return whole
    # Every rank has the same values, so that none has to be sent.
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


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
    """

    def __init__(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], *, config: Optim, seed: int, dtype: torch.dtype
    ):
        self._parameters = dict(parameters)
        self._config, self._seed, self._dtype = config, seed, dtype
        self.num_updates = 0
        narrow = config.moment_dtype == "bf16"
        self._momentum = {
            name: torch.zeros_like(local(p), dtype=torch.bfloat16 if narrow else p.dtype, requires_grad=False)
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def step(self, *, learning_rate: float) -> None:
        """Updates every parameter from its gradient; one without a gradient is left as it is."""
        self.num_updates += 1
        for number, (name, parameter) in enumerate(self._parameters.items()):
            if parameter.grad is not None:
                update = self._look_ahead(number, name, parameter.grad)
                pace = pace_of(name, parameter.ndim, config=self._config)
                self._move(name, parameter, update, learning_rate=learning_rate * pace.rate, decay=pace.decay)

    def _look_ahead(self, number: int, name: str, gradient: Tensor) -> Tensor:
        """Takes the gradient into the momentum; returns, of this rank's rows, what it will be if the next one is the same."""
        beta, momentum, mine = self._config.momentum, self._momentum[name], local(gradient)
        if momentum.dtype == torch.bfloat16:
            moved = momentum.to(mine.dtype).mul_(beta).add_(mine)
            generator = torch.Generator(device=momentum.device)
            generator.manual_seed(mixed_seed(self._seed, self.num_updates, number))
            momentum.copy_(round_stochastically(moved.float(), generator=generator))
        else:
            moved = momentum.mul_(beta).add_(mine)
        return torch.add(mine, moved, alpha=beta)

    def _move(
        self, name: str, parameter: torch.nn.Parameter, update: Tensor, *, learning_rate: float, decay: float
    ) -> None:
        """One decoupled decay and one orthogonal step of a parameter."""
        whole = _whole(update, parameter)
        matrices = split_matrices(name, whole)
        size = _RMS * math.sqrt(max(matrices.shape[-2:]))
        factor = join_matrices(name, self._orthogonal(matrices), whole)
        value = local(parameter)
        value.mul_(1.0 - learning_rate * decay)
        value.add_(_part(factor, parameter), alpha=-learning_rate * size)

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        batch = max(1, _BATCH // math.prod(matrices.shape[-2:]))
        for part in matrices.split(batch):
            part.copy_(orthogonalize(part.to(self._dtype), steps=self._config.newton_schulz_steps))
        return matrices

    def state(self) -> dict[str, Tensor]:
        """The momentum by name, as it is, not copied."""
        return {f"{name}.momentum": momentum for name, momentum in self._momentum.items()}

    def load(self, state: Mapping[str, Tensor], *, num_updates: int) -> None:
        """Takes back what `state` gave, and the number of updates done."""
        for name, momentum in self.state().items():
            momentum.copy_(state[name])
        self.num_updates = num_updates
