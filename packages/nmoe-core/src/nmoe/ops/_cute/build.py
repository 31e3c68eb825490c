# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled once per machine: kept in memory, and on disk under ``$NMOE_CACHE/kernels``, by chip.

A compiled kernel is one object file, named by the builder's arguments and by a fingerprint of every source it could
depend on, so that a stale one is never loaded. Of the processes that want the same kernel one compiles, under a file
lock; the others wait for its file. Loading a kernel takes a millisecond, compiling it 0.3 to 3 s.

The machinery is quack's `jit_cache`, which its own kernels use too, so both lie in one folder.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import quack.cache as quack_cache
import quack.gemm
import quack.gemm_runtime.host
import quack.gemm_symmetric
import torch

from nmoe.ops._cute.folder import kernel_folder

__all__ = [
    "DTYPES",
    "ask",
    "compile_kernel",
    "compiled",
    "enter_context",
    "fake",
    "kernel_cache",
    "sm_count",
]

_log = logging.getLogger(__name__)

DTYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
    torch.uint8: cutlass.Uint8,
}
"""torch dtype -> CuTe element type."""

ask: Callable[[Callable[..., Any], tuple[Any, ...]], Any] | None = None
"""While kernels are listed (`listing`): takes a builder and its arguments, in place of compiling."""

_BY_NAME = {str(t).removeprefix("torch."): c for t, c in DTYPES.items()}
_PACKAGE = Path(__file__).parents[2]
_SOURCES = ("ops", "comm")
"""Folders whose sources can change a kernel: it takes constants and layouts from the second."""

_seconds: list[float] = []


def compiled() -> list[float]:
    """Seconds of every compilation that this process has done; empty where all kernels came from disk."""
    return _seconds


def _timed(build: Callable[..., Any]) -> Callable[..., Any]:
    """``build``, which compiles, with a word in the log before the first kernel."""

    @functools.wraps(build)
    def timed(*args: Any, **keys: Any) -> Any:
        if not _seconds:
            _log.info("compiling kernels, once for this machine; they are kept in %s", quack_cache.CACHE_DIR)
        start = time.perf_counter()
        kernel = build(*args, **keys)
        _seconds.append(time.perf_counter() - start)
        return kernel

    return timed


def _set_up() -> None:
    """Keep compiled kernels, quack's own too, in this project's folder, and time their compilation; once, on import.

    quack's own variables do not move or end that: its folder knows no chips, and the warm-up keeps its lists beside the kernels.
    """
    quack_cache.CACHE_ENABLED, quack_cache.CACHE_DIR = True, str(kernel_folder())
    quack_cache.EXTRA_SOURCE_DIRS.extend(_PACKAGE / name for name in _SOURCES)
    for module in (quack.gemm, quack.gemm_runtime.host, quack.gemm_symmetric):
        module.compile_gemm_kernel = _timed(module.compile_gemm_kernel)


_set_up()


def kernel_cache(build: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a builder: a function from hashable arguments to what `compile_kernel` returns.

    The builder's qualified name is part of the key, so it must be unique in this package.
    """
    cached = quack_cache.jit_cache(_timed(build))

    @functools.wraps(build)
    def fetch(*key: Any) -> Any:
        if ask is not None:
            return ask(fetch, key)
        enter_context()
        return cached(*key)

    return fetch


_thread = threading.local()


def enter_context() -> None:
    """Make the device's context current in this thread; to be called before a kernel.

    PyTorch's backward threads have none until the CUDA runtime is used there, and a kernel that was loaded from disk
    rather than compiled there would fail with "invalid context".
    """
    if not getattr(_thread, "entered", False) and torch.cuda.is_available():
        torch.cuda.mem_get_info()  # a call of the runtime that neither waits nor launches
        _thread.entered = True


def fake(dtype: str, *shape: Any, align: int = 16) -> Any:
    """A stand-in for a row-major argument of a kernel.

    Args:
        dtype: Name of a torch dtype.
        shape: Static extents, or None for one that only the call knows. The last axis is contiguous.
        align: Alignment of every row in bytes; 4 for tensors of scalars.
    """
    element = _BY_NAME[dtype]
    divisibility = max(align * 8 // element.width, 1)
    extents = tuple(cute.sym_int() if n is None else n for n in shape)
    # 64-bit strides, because rows x width passes 2^31 elements in use.
    strides = (*(cute.sym_int64(divisibility=divisibility) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(element, extents, stride=strides, assumed_align=align)


def compile_kernel(entry: Any, *args: Any) -> Any:
    """Compile a ``cute.jit`` entry whose last parameter is the stream; called with torch tensors, without it."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(entry, *args, stream, options="--enable-tvm-ffi")


@functools.cache
def sm_count(device_index: int | None) -> int:
    """Multiprocessors of a CUDA device."""
    if ask is not None:
        return 1  # nothing will be launched
    return torch.cuda.get_device_properties(device_index).multi_processor_count
