# SPDX-License-Identifier: Apache-2.0
"""Which kernels a computation asks for, found by running it on tensors without memory, so that they can be compiled before.

Nothing is launched and no GPU is needed. Every kernel is asked for through a cache, of `build`, of quack or of
flash-attn-4; while a listing is open these note the question and answer with a function that does nothing. The libraries
remember such functions in places of their own, so a process that has listed must never launch a kernel.
"""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import cutlass
import cutlass.cute as cute
import quack.gemm_interface  # noqa: F401  with all of quack that `products` uses
import torch
from quack.cache import jit
from quack.rmsnorm import _rmsnorm_bwd
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from nmoe.ops._cute import build
from nmoe.ops.attention import cuda as attention
from nmoe.ops.rms_norm import cuda as rms_norm

__all__ = ["Task", "listing", "semaphores"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Kernels that one call compiles."""

    kernels: dict[Path, str]
    """Object file -> what it holds, in a few words."""
    compile: Callable[[], object]
    """Compiles those of them that are not on disk, and stores them there."""


@dataclass(kw_only=True, slots=True)
class _Found:
    tasks: list[Task] = field(default_factory=list)
    paths: set[Path] = field(default_factory=set)

    def note(self, kernels: dict[Path, str], run: Callable[[], object]) -> None:
        new = {path: name for path, name in kernels.items() if path not in self.paths}
        self.paths |= new.keys()
        if new:
            self.tasks.append(Task(kernels=new, compile=run))


@contextlib.contextmanager
def listing() -> Iterator[list[Task]]:
    """Fills the list with what is asked for within the block, which computes on fake tensors."""
    found = _Found()
    replaced: list[tuple[Any, str, Any]] = [
        (build, "ask", functools.partial(_note_ours, found)),
        (FakeTensor, "data_ptr", lambda _: 0),
        (torch, "addmm", lambda *_, out, **__: out),  # fake tensors of PyTorch 2.11 add its out_dtype as if it were one
        (rms_norm, "rmsnorm_bwd", _rms_norm_backward),
        (attention, "prepare", _any_documents),
        (attention, "forward", functools.partial(_attention, found, attention.forward)),
        (attention, "backward", functools.partial(_attention, found, attention.backward)),
    ]
    for module in [m for name, m in [*sys.modules.items()] if name.startswith(("quack.", "nmoe.ops."))]:
        for name, value in [*vars(module).items()]:
            if name == "fault_record":  # page-locked memory, which there is none of without a GPU
                replaced.append((module, name, lambda: torch.empty(8, dtype=torch.int64)))
            elif (
                inspect.isfunction(value)
                and value.__code__.co_filename == jit.__file__
                and hasattr(value, "cache_info")
            ):
                replaced.append((module, name, functools.partial(_note_quacks, found, value)))
            elif name == "get_max_active_clusters":  # asks the driver
                replaced.append((module, name, lambda *_, **__: 1))
    _flash_attn("utils").convert_from_dlpack_leading_static = semaphores  # for good: compiling needs it as well
    with contextlib.ExitStack() as stack:
        for holder, name, value in replaced:
            stack.enter_context(mock.patch.object(holder, name, value))
        yield found.tasks


def _nothing(*_: object) -> None:
    """Takes the place of a kernel."""


def _note_ours(found: _Found, fetch: Callable, key: tuple) -> Callable:
    return _note_quacks(found, fetch, *key)


def _note_quacks(found: _Found, cached: Callable, *args: Any, **keys: Any) -> Callable:
    """Notes what a function under quack's `jit_cache` was asked for."""
    key = args + tuple(sorted(keys.items())) if keys else args
    sha = jit._key_to_hash((cached.__qualname__, *key))
    path = jit.get_cache_path() / jit._compute_source_fingerprint() / f"{sha}.o"
    found.note({path: _asker()}, functools.partial(cached, *args, **keys))
    return _nothing


def _asker() -> str:
    """The op that asks for a kernel, and its function: "route_topk pieces"."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals["__name__"]
        if module.startswith("nmoe.ops.") and not module.startswith("nmoe.ops._cute."):
            return " ".join(dict.fromkeys([module.split(".")[2], frame.f_code.co_name.strip("_")]))
        frame = frame.f_back
    return "kernel"


def _attention(found: _Found, run: Callable, *args: Any, **keys: Any) -> Any:
    """Notes what flash-attn-4 looks for in its caches, for few documents and for many; it launches nothing on fake tensors."""
    mode, result = active_fake_mode(), None
    many = _flash_attn("interface").BIN_BATCH_SEARCH_THRESH + 1  # from here on kernels of their own
    for count in (1, many):
        offset = torch.empty(count + 1, dtype=torch.int32, device="cuda")
        arguments = tree_map_only(Tensor, _on_gpu, args)
        arguments = tree_map_only(attention.Documents, lambda d, offset=offset: replace(d, offset=offset), arguments)
        asked: dict[Path, str] = {}

        def contains(cache: Any, key: tuple, asked: dict = asked) -> bool:
            asked[cache.cache_path / f"{cache._key_to_hash(key)}.o"] = f"attention {cache.cache_path.name}"
            return True

        def compile_all(arguments: tuple = arguments) -> None:
            with mode, torch.no_grad():
                run(*arguments, **keys)

        with mock.patch.object(_flash_attn("cache_utils").JITPersistentCache, "__contains__", contains):
            result = run(*arguments, **keys)
        found.note(asked, compile_all)
    return tree_map_only(Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), result)


def _flash_attn(module: str) -> Any:
    """Not imported above, because what `ops.attention.cuda` says about its cache must come first."""
    return importlib.import_module(f"flash_attn.cute.{module}")


def _on_gpu(tensor: Tensor) -> Tensor:
    """As flash-attn-4 wants it. The listing itself computes as if on a CPU: autograd would look for the device."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = torch.empty(size, dtype=tensor.dtype, device="cuda")
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _any_documents(document_BT: Tensor, *, window: int, device: torch.device) -> attention.Documents:
    """As `prepare` gives them, without their number."""
    del device
    bound = max(document_BT.shape[1], attention._SHORTEST_BOUND)
    return attention.Documents(offset=torch.empty(2, dtype=torch.int32), bound=bound, window=window)


def semaphores(tensor: Tensor, **_: Any) -> Any:
    """Stands for flash-attn-4's counters, the only tensors that it compiles for with their memory."""
    shape = (*(cute.sym_int() for _ in tensor.shape[:3]), tensor.shape[3])
    return cute.runtime.make_fake_compact_tensor(cutlass.Int32, shape, stride_order=(3, 2, 1, 0), assumed_align=4)


def _rms_norm_backward(x: Tensor, weight: Tensor, dout: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """quack's own would not come as far as its kernel on fake tensors."""
    dx, partial = torch.empty_like(x), torch.empty(1, x.shape[-1], dtype=torch.float32, device=x.device)
    _rmsnorm_bwd(x, weight, dout, rstd, dx, partial)
    return dx, torch.empty_like(weight), None, None
