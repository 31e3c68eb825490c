# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels lie on disk; apart from `build`, so that asking does not import the compiler."""

import os
from importlib.metadata import version
from pathlib import Path

from nmoe import arch

__all__ = ["attention_folder", "kernel_folder"]


def kernel_folder(chip: str = "") -> Path:
    """Folder of a chip, by default this process's: machines may share a home, and a kernel's name does not tell chips apart."""
    root = Path(os.environ.get("NMOE_CACHE") or Path.home() / ".cache" / "nmoe")
    return root / "kernels" / (chip or os.environ.get("CUTE_DSL_ARCH") or arch.current().target or "unknown")


def attention_folder() -> Path:
    """Folder of flash-attn-4's kernels, which it names by its own sources, but not by quack's, of which it is made too."""
    return kernel_folder() / f"flash-attn-4-quack-{version('quack-kernels')}"
