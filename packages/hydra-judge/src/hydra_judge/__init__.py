# SPDX-License-Identifier: Apache-2.0
"""A large language model reads a corpus and decides what another one is trained on.

The package is used by its command line, `hydra-judge`; importing it has no effect.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
