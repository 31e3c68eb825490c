# SPDX-License-Identifier: Apache-2.0
"""From the name of an op to the file that implements it on this process's arch.

The file name is the registration: nothing has to be declared. A file that is missing is an error that names it; there
is no fall back to another arch, because a kernel that silently is not used shows up only as lost speed.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nmoe import arch
from nmoe.errors import EnvironmentFault

__all__ = ["compile_seconds", "implementation", "op_names", "source_file", "table"]

_FOLDER = Path(__file__).parent


def op_names() -> list[str]:
    """Names of all ops, sorted."""
    return sorted(p.parent.name for p in _FOLDER.glob("*/__init__.py") if not p.parent.name.startswith("_"))


def source_file(op: str, *, on: arch.Arch) -> Path | None:
    """The file that implements ``op`` on an arch, or None where it is missing."""
    candidates = (_FOLDER / op / f"{stem}.py" for stem in on.stems)
    return next((path for path in candidates if path.is_file()), None)


@functools.cache
def implementation(op: str) -> ModuleType:
    """The module that implements ``op`` on this process's arch.

    Raises:
        EnvironmentFault: The arch has no file for the op.
    """
    on = arch.current()
    path = source_file(op, on=on)
    if path is None:
        raise EnvironmentFault(
            f"nmoe/ops/{op}/{on.stems[0]}.py: no such file, so {op} has no kernel for {on.name}; "
            "set NMOE_ARCH=reference to run plain torch instead"
        )
    module = importlib.import_module(f"nmoe.ops.{op}.{path.stem}")
    return _checked(module, op) if os.environ.get("NMOE_CHECK") == "1" else module


def _checked(module: ModuleType, op: str) -> ModuleType:
    """The same, but each function waits for the GPU, so that a fault of a kernel is raised where it was made.

    For finding faults (`NMOE_CHECK=1`): slow, and nothing can be captured in a CUDA graph.
    """
    checked = ModuleType(module.__name__)
    vars(checked).update(vars(module))
    for name in module.__all__:
        if inspect.isfunction(vars(module)[name]):
            setattr(checked, name, _then_wait(vars(module)[name], f"{op}.{name}"))
    return checked


def _then_wait(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **keys: Any) -> Any:
        try:
            result = function(*args, **keys)
            cuda = sys.modules["torch"].cuda
            if cuda.is_available():
                cuda.synchronize()
        except RuntimeError as error:
            shapes = [(str(a.dtype), *a.shape) for a in (*args, *keys.values()) if hasattr(a, "dtype")]
            raise RuntimeError(f"NMOE_CHECK: in {name} of {shapes}: {error}") from error
        return result

    return run


def table() -> dict[str, str]:
    """Op -> file that serves it in this process (``missing: FILE`` where there is none), for the log."""
    on = arch.current()
    rows = {}
    for op in op_names():
        path = source_file(op, on=on)
        rows[op] = f"nmoe/ops/{op}/{path.name}" if path else f"missing: nmoe/ops/{op}/{on.stems[0]}.py"
    return rows


def compile_seconds() -> list[float]:
    """Seconds of every kernel that this process has compiled so far; those found on disk cost a millisecond each."""
    build = sys.modules.get("nmoe.ops._cute.build")
    return list(build.compiled()) if build else []
