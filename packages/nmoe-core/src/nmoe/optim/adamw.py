# SPDX-License-Identifier: Apache-2.0
"""AdamW on fp32 (or fp64) master values, with moments in the masters' precision or in bf16.

The parameters themselves are the masters: an update of 1e-4 of a weight's size would round away in bf16. bf16 moments
halve the optimizer's memory (7.34 B parameters: 29 GB instead of 59) and are rounded stochastically, because rounding to
nearest would freeze a second moment that changes by less than 1/256 a step (beta2 = 0.999 and up). The random bits are a
function of (seed, update, parameter, place in this rank's rows), so a resumed run rounds as the uninterrupted one does;
with another number of ranks it rounds otherwise, as well.
"""

from collections.abc import Iterable, Mapping

import torch
from torch.optim.adamw import adamw

from nmoe.config import Optim
from nmoe.optim.groups import Pace, pace_of
from nmoe.pieces import local

__all__ = ["AdamW", "mixed_seed", "round_stochastically"]

# Elements updated at a time where moments are widened, so that temporaries stay at 256 MiB whatever the tensor's size.
_CHUNK = 1 << 24


class AdamW:
    """AdamW over named parameters, each at the pace of its group (`nmoe.optim.groups`).

    Args:
        parameters: (name, parameter) pairs, fp32 or fp64; of a sharded one, this rank's rows.
        config: rates, decay and the moments' dtype.
        seed: seed of the stochastic rounding.

    Source: Loshchilov, Hutter 2019, arXiv:1711.05101 algorithm 2; decay times the learning rate.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], *, config: Optim, seed: int):
        self._parameters = dict(parameters)
        self._config, self._seed = config, seed
        self.num_updates = 0
        narrow = config.moment_dtype == "bf16"
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            dtype = torch.bfloat16 if narrow else parameter.dtype
            zeros = [torch.zeros_like(local(parameter), dtype=dtype, requires_grad=False) for _ in range(2)]
            self._moments[name] = (zeros[0], zeros[1])
        self._update = self._update_narrow if narrow else self._update_fused

    def step(self, *, learning_rate: float) -> None:
        """Updates every parameter from its gradient; one without a gradient is left as it is."""
        self.num_updates += 1
        by_pace: dict[Pace, list[str]] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                by_pace.setdefault(pace_of(name, parameter.ndim, config=self._config), []).append(name)
        for pace, names in by_pace.items():
            self._update(names, learning_rate * pace.rate, pace.decay)

    @torch.no_grad()
    def _update_fused(self, names: list[str], learning_rate: float, weight_decay: float) -> None:
        parameters = [local(self._parameters[name]) for name in names]
        gradients = [local(gradient) for name in names if (gradient := self._parameters[name].grad) is not None]
        device = parameters[0].device
        # The fused kernel adds one itself.
        steps = [torch.tensor(float(self.num_updates - 1), device=device) for _ in names]
        adamw(
            parameters,
            gradients,
            [self._moments[name][0] for name in names],
            [self._moments[name][1] for name in names],
            [],
            steps,
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
    def _update_narrow(self, names: list[str], learning_rate: float, weight_decay: float) -> None:
        beta1, beta2 = self._config.betas
        correction1, correction2 = 1.0 - beta1**self.num_updates, 1.0 - beta2**self.num_updates
        order = {name: number for number, name in enumerate(self._parameters)}
        for name in names:
            parameter, moments = local(self._parameters[name]), self._moments[name]
            gradient = self._parameters[name].grad
            assert gradient is not None
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(mixed_seed(self._seed, self.num_updates, order[name]))
            parts = zip(*(t.view(-1).split(_CHUNK) for t in (parameter, local(gradient), *moments)), strict=True)
            for value, grad, first_bf16, second_bf16 in parts:
                first = first_bf16.to(value.dtype).lerp_(grad, 1.0 - beta1)
                second = second_bf16.to(value.dtype).mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                value.mul_(1.0 - learning_rate * weight_decay)
                size = (second / correction2).sqrt_().add_(self._config.eps)
                value.addcdiv_(first, size, value=-learning_rate / correction1)
                first_bf16.copy_(round_stochastically(first.float(), generator=generator))
                second_bf16.copy_(round_stochastically(second.float(), generator=generator))

    def state(self) -> dict[str, torch.Tensor]:
        """The moments by name, as they are, not copied."""
        return {
            f"{name}.{kind}": moment
            for name, moments in self._moments.items()
            for kind, moment in zip(("first", "second"), moments, strict=True)
        }

    def load(self, state: Mapping[str, torch.Tensor], *, num_updates: int) -> None:
        """Takes back what `state` gave, and the number of updates done."""
        for name, moment in self.state().items():
            moment.copy_(state[name])
        self.num_updates = num_updates


def round_stochastically(values: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Rounds to bf16, up with the probability of the part that is cut off; the mean is the value itself.

    Args:
        values: fp32, any shape.
        generator: source of the random bits, on the same device.

    Returns:
        bf16 of the same shape. Infinities and NaN stay what they are.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def mixed_seed(seed: int, update: int, number: int) -> int:
    """One 63-bit seed from three numbers (SplitMix64's constants)."""
    value = 0
    for part in (seed, update, number):
        value = (value + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value & 0x7FFFFFFFFFFFFFFF
