# SPDX-License-Identifier: Apache-2.0
"""AdamW on fp32 (or fp64) master values, with moments in the masters' precision or in bf16.

The parameters themselves are the masters: an update of 1e-4 of a weight's size would round away in bf16. bf16 moments
halve the optimizer's memory (7.34 B parameters: 29 GB instead of 59) and are rounded stochastically, because rounding to
nearest would freeze a second moment that changes by less than 1/256 a step (beta2 = 0.999 and up). The random bits are a
function of (seed, update, parameter's name, element's place in the whole parameter), so a resumed run rounds as the
uninterrupted one does, and so does any other number of ranks.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch.optim.adamw import adamw

from nmoe.config import Optim
from nmoe.ops.adamw import Rule, kernels
from nmoe.optim.groups import Pace, pace_of
from nmoe.optim.noise import noise_key
from nmoe.pieces import Piece, local

__all__ = ["AdamW"]


class AdamW:
    """AdamW over named parameters, each at the pace of its group (`nmoe.optim.groups`).

    Args:
        parameters: (name, parameter) pairs, fp32 or fp64; of a sharded one, this rank's rows.
        config: rates, decay and the moments' dtype.
        seed: seed of the stochastic rounding.
        pieces: by name, which rows of a parameter these are; one that is not named is whole.

    Source: Loshchilov, Hutter 2019, arXiv:1711.05101 algorithm 2; decay times the learning rate.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        config: Optim,
        seed: int,
        pieces: Mapping[str, Piece] = MappingProxyType({}),
    ):
        self._parameters = dict(parameters)
        self._offset = {name: pieces[name].offset if name in pieces else 0 for name in self._parameters}
        self._config, self._seed = config, seed
        self.num_updates = 0
        narrow = config.moment_dtype == "bf16"
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            dtype = torch.bfloat16 if narrow else parameter.dtype
            zeros = [torch.zeros_like(local(parameter), dtype=dtype, requires_grad=False) for _ in range(2)]
            self._moments[name] = (zeros[0], zeros[1])
        self._update = self._update_narrow if narrow else self._update_fused

    def step(self, *, learning_rate: float, scale: float = 1.0) -> None:
        """Updates every parameter from its gradient times `scale`; one without a gradient is left as it is."""
        self.num_updates += 1
        by_pace: dict[Pace, list[str]] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                by_pace.setdefault(pace_of(name, parameter.ndim, config=self._config), []).append(name)
        for pace, names in by_pace.items():
            self._update(names, learning_rate * pace.rate, pace.decay, scale)

    @torch.no_grad()
    def _update_fused(self, names: list[str], learning_rate: float, weight_decay: float, scale: float) -> None:
        parameters = [local(self._parameters[name]) for name in names]
        gradients = [local(gradient) for name in names if (gradient := self._parameters[name].grad) is not None]
        if scale != 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        # The fused kernel adds one itself. Filled on the device: a copy from the host, one a parameter, would wait for it.
        steps = torch.full((len(names),), float(self.num_updates - 1), device=parameters[0].device)
        adamw(
            parameters,
            gradients,
            [self._moments[name][0] for name in names],
            [self._moments[name][1] for name in names],
            [],
            list(steps.unbind()),
            fused=True,
            amsgrad=False,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self._config.eps,
            maximize=False,
        )
        # The fused kernel does not count as a change by itself, and copies of weights are renewed by that count.
        torch.autograd.graph.increment_version(parameters)

    @torch.no_grad()
    def _update_narrow(self, names: list[str], learning_rate: float, weight_decay: float, scale: float) -> None:
        config = self._config
        rule = Rule(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=config.eps,
            number=self.num_updates,
            scale=scale,
        )
        for name in names:
            parameter, gradient = self._parameters[name], self._parameters[name].grad
            assert gradient is not None
            kernels().step(
                local(parameter),
                local(gradient),
                *self._moments[name],
                rule=rule,
                key=noise_key(self._seed, update=self.num_updates, name=name),
                offset=self._offset[name],
            )
            torch.autograd.graph.increment_version([local(parameter)])

    def state(self) -> dict[str, torch.Tensor]:
        """The moments by name, as they are, not copied."""
        return {
            f"{name}.{kind}": moment
            for name, moments in self._moments.items()
            for kind, moment in zip(("first", "second"), moments, strict=True)
        }
