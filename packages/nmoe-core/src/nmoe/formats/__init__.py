# SPDX-License-Identifier: Apache-2.0
"""The on-disk contracts: documents, shards, the order of data, tokenizers, runs and metrics.

Writer and reader of a format stand in one file, each format has an integer version, and a reader refuses a newer one
by name. Nothing here imports torch, so the judge and the dashboard need nothing else of nmoe.
"""

from nmoe.errors import DataError, EnvironmentFault, FormatError, NmoeError

__all__ = ["DataError", "EnvironmentFault", "FormatError", "NmoeError"]
