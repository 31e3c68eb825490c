# SPDX-License-Identifier: Apache-2.0
"""Learning rate of a step, a pure function of its number: nothing to save, nothing to restore."""

import math

from nmoe.config import Config

__all__ = ["learning_rate"]


def learning_rate(config: Config, *, step: int) -> float:
    """Learning rate of one step.

    Linear warmup to the peak at step `schedule.warmup_steps`. Then wsd stays at the peak and falls linearly over the
    last `schedule.decay_steps` steps, while cosine and linear fall all the way; each reaches `schedule.final_ratio` of
    the peak in the last step. Lengths given in tokens are steps by now (`nmoe.config.tokens`).

    Args:
        config: `schedule`, `train.steps` and `optim.learning_rate` are read.
        step: number of the step, from 1.

    Source: Hu et al. 2024, arXiv:2404.06395 section 4 (warmup-stable-decay); Loshchilov, Hutter 2017, arXiv:1608.03983
        (cosine).
    """
    schedule, steps, peak = config.schedule, config.train.steps, config.optim.learning_rate
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    final = schedule.final_ratio
    if schedule.kind == "cosine":
        progress = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
        return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))
    decay = schedule.decay_steps if schedule.kind == "wsd" else steps - schedule.warmup_steps
    into_decay = step - (steps - decay)
    if into_decay <= 0:
        return peak
    return peak * (1.0 - (1.0 - final) * min(1.0, into_decay / decay))
