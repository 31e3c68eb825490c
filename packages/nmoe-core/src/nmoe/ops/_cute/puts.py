# SPDX-License-Identifier: Apache-2.0
"""Puts of NVSHMEM inside a kernel: its device functions, linked into the kernel from NVIDIA's bitcode.

A kernel with such a function holds a copy of NVSHMEM's device state, which has to be filled in after the kernel is loaded
(`nvshmemx_culibrary_init`). That takes the loaded library's handle, which kernels from the disk cache do not give; so these
few kernels are compiled in each process, and take addresses and numbers alone.

Compiled for both chips in CI; nothing of it has been run on a network.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream  # type: ignore[attr-defined]
from cutlass import Int32, Int64

from nmoe.errors import EnvironmentFault
from nmoe.ops._cute import build as kept
from nmoe.ops._cute.build import enter_context

__all__ = ["compile_with_puts", "put_block", "quiet", "ready", "see", "signal"]

_SIGNAL_SET, _GREATER_EQUAL = 9, 5
"""NVSHMEM_SIGNAL_SET and NVSHMEM_CMP_GE of its headers."""


class _Bitcode(cute.BitCode):
    """NVSHMEM's device functions. NVIDIA ships one file for each generation up to Hopper, which later chips use too."""

    def __init__(self) -> None:
        """The path is looked up when a kernel is traced, not on import."""

    @property
    def path(self) -> str:  # type: ignore[override]
        """Of the file."""
        from cuda.pathfinder import find_nvidia_header_directory

        headers = find_nvidia_header_directory("nvshmem")
        found = Path(headers).parent / "lib" / "libnvshmem_device_sm_90.bc" if headers else None
        if found is None or not found.is_file():
            raise EnvironmentFault(
                f"NVSHMEM's device library is missing ({found}); puts need that of NVSHMEM 3.7 or newer, which comes "
                "with PyTorch 2.15 (those before pin 3.4.5, whose device library CuTe DSL cannot compile)"
            )
        return str(found)


_NVSHMEM = _Bitcode()


@cute.extern(name="nvshmemx_putmem_nbi_block", source=_NVSHMEM)
def _putmem_nbi_block(target: Int64, source: Int64, nbytes: Int64, pe: Int32) -> None: ...


@cute.extern(name="nvshmem_quiet", source=_NVSHMEM)
def _quiet() -> None: ...


@cute.extern(name="nvshmemx_signal_op", source=_NVSHMEM)
def _signal_op(flag: Int64, value: Int64, how: Int32, pe: Int32) -> None: ...


@cute.extern(name="nvshmem_uint64_test", source=_NVSHMEM)
def _uint64_test(flag: Int64, how: Int32, value: Int64) -> Int32: ...


@cute.jit
def put_block(target: Int64, source: Int64, nbytes: Int64, pe: Int32):
    """Start a put, by all threads of a block together.

    Args:
        target: Address of the same place in this rank's own symmetric memory.
        source: Address in this rank's symmetric memory.
        nbytes: Length.
        pe: Number of the rank in NVSHMEM.
    """
    _putmem_nbi_block(target, source, nbytes, pe)


@cute.jit
def quiet():
    """Wait until everything that this rank has put is in the peers' memory."""
    _quiet()


@cute.jit
def signal(flag: Int64, value: Int64, pe: Int32):
    """Set a 64-bit flag of a peer; ``flag`` is the address of this rank's own."""
    _signal_op(flag, value, Int32(_SIGNAL_SET), pe)


@cute.jit
def see(flag: Int64, value: Int64):
    """Make visible what a peer put before it set this flag to ``value`` or more, which must have been seen here already."""
    _uint64_test(flag, Int32(_GREATER_EQUAL), value)


def compile_with_puts(entry: Any, *args: Any, options: str = "") -> Any:
    """Compile a ``cute.jit`` entry of numbers whose last parameter is a stream."""
    return cute.compile(entry, *args, CUstream(0), **({"options": options} if options else {}))


def ready(build: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a builder that returns what `compile_with_puts` does: built once, and known to NVSHMEM before it is launched.

    What it gives is called with numbers, and runs on the current stream.
    """

    @functools.cache
    def loaded(*key: Any) -> Any:
        import nvshmem.core as nvshmem

        enter_context()
        kernel = build(*key).to(torch.cuda.current_device())
        (library,) = kernel.jit_module.cuda_library
        nvshmem.library_init(nvshmem.NvshmemKernelObject.from_handle(int(library)))
        return kernel

    def launch(*key: Any) -> Callable[..., None]:
        if kept.ask is not None:  # a listing of kernels on disk, of which this is none
            return lambda *_: None
        kernel = loaded(*key)
        return lambda *numbers: kernel(*numbers, CUstream(torch.cuda.current_stream().cuda_stream))

    launch.build = build  # type: ignore[attr-defined]
    return launch
