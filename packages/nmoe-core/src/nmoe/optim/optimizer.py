# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a run: AdamW for all parameters, or Muon for the matrices and AdamW for the rest."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from nmoe.config import Optim
from nmoe.optim.adamw import AdamW
from nmoe.optim.groups import is_matrix_rule
from nmoe.optim.muon import Muon
from nmoe.pieces import Piece

__all__ = ["MatricesAndRest", "Optimizer", "make_optimizer"]


class Optimizer(Protocol):
    """What the trainer needs of an optimizer."""

    @property
    def num_updates(self) -> int:
        """Updates done; those of skipped steps are not."""
        ...

    @num_updates.setter
    def num_updates(self, number: int) -> None: ...

    def step(self, *, learning_rate: float, scale: float = 1.0) -> None:
        """Updates every parameter from its gradient times `scale`; one without a gradient is left as it is.

        The gradients are spent: they may have been scaled in place, or not.
        """
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor that updates change, by name, as it is, not copied: a checkpoint is read into it."""
        ...


class MatricesAndRest:
    """Muon and AdamW, each over its own parameters, as one `Optimizer`."""

    def __init__(self, matrices: Muon, rest: AdamW):
        self._parts: tuple[Muon, AdamW] = (matrices, rest)

    @property
    def num_updates(self) -> int:
        """See `Optimizer`."""
        return self._parts[0].num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        for part in self._parts:
            part.num_updates = number

    def step(self, *, learning_rate: float, scale: float = 1.0) -> None:
        """See `Optimizer`."""
        for part in self._parts:
            part.step(learning_rate=learning_rate, scale=scale)

    def state(self) -> dict[str, torch.Tensor]:
        """See `Optimizer`."""
        return self._parts[0].state() | self._parts[1].state()


def make_optimizer(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    config: Optim,
    seed: int,
    dtype: torch.dtype,
    pieces: Mapping[str, Piece] = MappingProxyType({}),
) -> Optimizer:
    """The optimizer that `optim.kind` names.

    Args:
        parameters: (name, parameter) pairs, fp32 or fp64.
        config: the section [optim].
        seed: seed of the stochastic rounding of bf16 moments.
        dtype: of Muon's products; the activations' is precise enough.
        pieces: by name, which rows of a parameter these are; one that is not named is whole.
    """
    named = list(parameters)
    if config.kind == "adamw":
        return AdamW(named, config=config, seed=seed, pieces=pieces)
    matrices = [(name, p) for name, p in named if is_matrix_rule(name, p.ndim)]
    rest = [(name, p) for name, p in named if not is_matrix_rule(name, p.ndim)]
    return MatricesAndRest(
        Muon(matrices, config=config, seed=seed, dtype=dtype, pieces=pieces),
        AdamW(rest, config=config, seed=seed, pieces=pieces),
    )
