# SPDX-License-Identifier: Apache-2.0
"""Lengths that a config may state in tokens: turned into steps where the config is read, once, and nowhere else.

A step sees `train.batch_size * data.seq_len` tokens, so a length in tokens stays what it is when batch or length of the
sequences change; the step in which it ends is the first that has seen them all.
"""

from dataclasses import replace

from nmoe.config.schema import Config
from nmoe.errors import ConfigError

__all__ = ["in_steps"]

_LENGTHS = (
    ("train", "steps", "tokens"),
    ("schedule", "warmup_steps", "warmup_tokens"),
    ("schedule", "decay_steps", "decay_tokens"),
)


def in_steps(config: Config) -> Config:
    """The config with every length in tokens also given in steps.

    Raises:
        ConfigError: a length is given twice and differently, or the run has none.
    """
    for section, steps_key, tokens_key in _LENGTHS:
        table = getattr(config, section)
        steps, tokens = getattr(table, steps_key), getattr(table, tokens_key)
        if not tokens:
            continue
        counted = -(-tokens // config.tokens_per_step)
        if steps not in (0, counted):
            raise ConfigError(
                f"{section}.{steps_key} = {steps} contradicts {section}.{tokens_key} = {tokens}, which is {counted} steps "
                f"of {config.tokens_per_step} tokens; set one of them to 0"
            )
        config = replace(config, **{section: replace(table, **{steps_key: counted})})
    if not config.train.steps:
        raise ConfigError("train.steps is missing; expected it or train.tokens, at least 1")
    return config
