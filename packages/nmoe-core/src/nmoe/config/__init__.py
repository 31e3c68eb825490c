# SPDX-License-Identifier: Apache-2.0
"""Training configs: frozen dataclasses, one per TOML section, and the reader that checks them.

`schema` states every key, `load` reads files and overrides, `rules` holds what concerns more than one key, `text`
writes the resolved config back.
"""

from nmoe.config.load import config_from_tables, load_config, parse_config
from nmoe.config.rules import changed_keys
from nmoe.config.schema import (
    Attention,
    Checkpoint,
    Config,
    Data,
    Metrics,
    Model,
    Moe,
    Optim,
    Parallel,
    Rdep,
    Rope,
    Run,
    Schedule,
    Source,
    Train,
)

__all__ = [
    "Attention",
    "Checkpoint",
    "Config",
    "Data",
    "Metrics",
    "Model",
    "Moe",
    "Optim",
    "Parallel",
    "Rdep",
    "Rope",
    "Run",
    "Schedule",
    "Source",
    "Train",
    "changed_keys",
    "config_from_tables",
    "load_config",
    "parse_config",
]
