# SPDX-License-Identifier: Apache-2.0
"""Which implementation of every op this process runs: decided once, from the device's compute capability.

========== ============= =====================================================
capability sources       compiled for
========== ============= =====================================================
10.0       sm100a        sm_100a (B200)
10.3       sm100a        sm_103a (B300: code for sm_100a does not run there)
9.0        sm90a         sm_90a (H100, H200)
no GPU     reference     plain torch
========== ============= =====================================================

Every other device is refused by name. ``NMOE_ARCH=reference|sm90a|sm100a`` overrides the choice: ``reference`` runs
plain torch on whatever device the tensors are on, the other two let a machine without a GPU compile kernels.
"""

import functools
import os
from dataclasses import dataclass

from nmoe.errors import EnvironmentFault

__all__ = ["Arch", "arch_of", "arch_on", "current", "decide", "misfit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arch:
    """One choice of implementations."""

    name: str
    """``reference``, ``sm90a`` or ``sm100a``."""
    stems: tuple[str, ...]
    """File names, without ``.py``, that may implement an op; the first that exists is taken."""
    target: str | None
    """Chip that kernels are compiled for, as compilers spell it; None for plain torch."""


_REFERENCE = Arch(name="reference", stems=("reference",), target=None)
_SM90A = Arch(name="sm90a", stems=("sm90a", "cuda"), target="sm_90a")
_SM100A = Arch(name="sm100a", stems=("sm100a", "cuda"), target="sm_100a")
_SM103A = Arch(name="sm100a", stems=("sm100a", "cuda"), target="sm_103a")
_BY_CAPABILITY = {(9, 0): _SM90A, (10, 0): _SM100A, (10, 3): _SM103A}
_BY_NAME = {arch.name: arch for arch in (_REFERENCE, _SM90A, _SM100A)}


def arch_of(capability: tuple[int, int] | None, *, device: str = "", override: str = "") -> Arch:
    """Map a compute capability to its implementations.

    Args:
        capability: (major, minor) of the device, or None where there is no GPU.
        device: Name of the device, for the message.
        override: Value of ``NMOE_ARCH``; empty for none.

    Raises:
        EnvironmentFault: The device is none of those listed above, or the override is not a name of an arch.
    """
    if override:
        if override not in _BY_NAME:
            raise EnvironmentFault(f"NMOE_ARCH: found {override!r}, expected one of {', '.join(_BY_NAME)}")
        chosen = _BY_NAME[override]
        # On a B300 the sources sm100a are still compiled for sm_103a.
        return _SM103A if chosen is _SM100A and capability == (10, 3) else chosen
    if capability is None:
        return _REFERENCE
    if capability not in _BY_CAPABILITY:
        known = ", ".join(f"{major}.{minor}" for major, minor in _BY_CAPABILITY)
        raise EnvironmentFault(
            f"{device or 'GPU'}: compute capability {capability[0]}.{capability[1]} has no kernels here (known: {known}); "
            "set NMOE_ARCH=reference to run plain torch on it"
        )
    return _BY_CAPABILITY[capability]


def misfit(arch: Arch, capability: tuple[int, int] | None) -> str:
    """What to say where the kernels of an arch do not run on a device (None: on a machine without one), else nothing."""
    if not arch.target or (capability is not None and _BY_CAPABILITY.get(capability) == arch):
        return ""
    found = f"compute capability {capability[0]}.{capability[1]}" if capability else "no GPU"
    return (
        f"NMOE_ARCH={arch.name}: these kernels run on {arch.target}, found {found}; "
        "unset it, or set it to reference for plain torch"
    )


def arch_on(capability: tuple[int, int] | None) -> tuple[Arch | None, str]:
    """What a start takes on a device (None: on a machine without one), or None and why it refuses."""
    try:
        arch = arch_of(capability, override=os.environ.get("NMOE_ARCH", ""))
    except EnvironmentFault as fault:
        return None, str(fault)
    problem = misfit(arch, capability)
    return (None if problem else arch), problem


@functools.cache
def current() -> Arch:
    """The arch of this process: of its current CUDA device, else ``reference``. Decided at the first call.

    Raises:
        EnvironmentFault: See `arch_of`.
    """
    import torch  # here, because importing nmoe.arch must neither need torch nor look for devices

    capability, device = None, ""
    if torch.cuda.is_available():
        capability, device = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    return arch_of(capability, device=device, override=os.environ.get("NMOE_ARCH", ""))


def decide(dtype: str) -> Arch:
    """The arch of a process that computes in a dtype; to be called before anything else asks for it.

    Kernels take bf16 only. fp32 and fp64 are for small models and for checking, and run plain torch on every device,
    unless ``NMOE_ARCH`` says otherwise.

    Args:
        dtype: ``bf16``, ``fp32`` or ``fp64``, as in `train.dtype`.

    Raises:
        EnvironmentFault: See `arch_of`; or ``NMOE_ARCH`` names kernels that do not run on the device of this process.
    """
    import torch

    if dtype != "bf16":
        os.environ.setdefault("NMOE_ARCH", "reference")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if problem := misfit(chosen := current(), capability):
        raise EnvironmentFault(problem)
    return chosen
