# SPDX-License-Identifier: Apache-2.0
"""The seams of ops: which file serves an op, and that every file has the contract's functions and signatures."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe import arch, dims
from nmoe.errors import EnvironmentFault
from nmoe.ops import registry

OPS = Path(registry.__file__).parent


def _contract(op: str) -> dict[str, str]:
    """Kernel function -> its parameters and result, as the protocol `Kernels` in ops/<op>/__init__.py spells them."""
    tree = ast.parse((OPS / op / "__init__.py").read_text())
    (protocol,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Kernels"]
    found = {}
    for function in protocol.body:
        if isinstance(function, ast.FunctionDef):
            assert function.args.args.pop(0).arg == "self"
            found[function.name] = _signature(function)
    return found


def _signature(function: ast.FunctionDef) -> str:
    return f"({ast.unparse(function.args)}) -> {ast.unparse(function.returns) if function.returns else None}"


FILES = [path for op in registry.op_names() for path in sorted((OPS / op).glob("*.py")) if path.stem != "__init__"]
ARCH_FILES = [p for p in FILES if p.stem in ("reference", "cuda", "sm90a", "sm100a")]


@pytest.mark.parametrize("path", ARCH_FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_arch_file_has_signatures_of_contract(path):
    # `Any` in a contract is what only the implementation knows the type of.
    functions = {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
    for name, wanted in _contract(path.parent.name).items():
        assert name in functions, f"{path} lacks {name}"
        pattern = re.escape(wanted).replace("Any", r".+")
        assert re.fullmatch(pattern, _signature(functions[name])), f"{path}: {name}{_signature(functions[name])}"


@pytest.mark.parametrize("op", registry.op_names())
def test_every_op_has_a_reference(op):
    assert (OPS / op / "reference.py").is_file()
    assert _contract(op)


@pytest.mark.parametrize("op", registry.op_names())
def test_shape_suffixes_are_in_the_legend(op):
    for function, signature in _contract(op).items():
        for suffix in re.findall(r"\b[a-z0-9]+_([A-Z0-9]+)\b", signature):
            unknown = set(re.sub(r"\d", "", suffix)) - set(dims.DIMS)
            assert not unknown, f"{op}.{function}: {suffix}"


@pytest.mark.parametrize(
    ("capability", "name", "target"),
    [
        ((9, 0), "sm90a", "sm_90a"),
        ((10, 0), "sm100a", "sm_100a"),
        ((10, 3), "sm100a", "sm_103a"),
        (None, "reference", None),
    ],
)
def test_arch_follows_compute_capability(capability, name, target):
    chosen = arch.arch_of(capability)
    assert (chosen.name, chosen.target) == (name, target)


def test_arch_refuses_other_devices_by_name():
    with pytest.raises(EnvironmentFault, match=r"NVIDIA A100.*8\.0.*NMOE_ARCH=reference"):
        arch.arch_of((8, 0), device="NVIDIA A100")
    assert arch.arch_of((8, 0), override="reference").name == "reference"
    with pytest.raises(EnvironmentFault, match="found 'sm80'"):
        arch.arch_of(None, override="sm80")
    assert arch.arch_of((10, 3), override="sm100a").target == "sm_103a"
    assert arch.arch_of(None, override="sm100a").target == "sm_100a"


def test_missing_kernel_is_an_error_that_names_the_file(monkeypatch, tmp_path):
    (tmp_path / "twist").mkdir()
    (tmp_path / "twist" / "__init__.py").touch()
    monkeypatch.setattr(registry, "_FOLDER", tmp_path)
    monkeypatch.setattr(arch, "current", lambda: arch.arch_of((9, 0)))
    with pytest.raises(EnvironmentFault, match=r"nmoe/ops/twist/sm90a\.py"):
        registry.implementation("twist")
    assert registry.table() == {"twist": "missing: nmoe/ops/twist/sm90a.py"}
    (tmp_path / "twist" / "cuda.py").touch()
    assert registry.table() == {"twist": "nmoe/ops/twist/cuda.py"}


def test_environment_overrides_arch():
    code = "from nmoe.ops import registry; print(registry.table()['combine'])"
    for name, expected in (("reference", "nmoe/ops/combine/reference.py"), ("sm90a", "nmoe/ops/combine/")):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "NMOE_ARCH": name},
            capture_output=True,
            text=True,
            check=True,
        )
        assert expected in out.stdout


def test_dtypes_without_kernels_run_plain_torch(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    arch.decide("bf16")
    assert "NMOE_ARCH" not in os.environ
    arch.decide("fp64")
    assert os.environ["NMOE_ARCH"] == "reference"
    os.environ["NMOE_ARCH"] = "sm90a"
    arch.decide("fp32")
    assert os.environ["NMOE_ARCH"] == "sm90a"  # whoever asks for kernels gets them, or their error


def test_importing_ops_reads_no_device():
    code = (
        "import torch\n"
        "def boom(*a, **k): raise SystemExit('device queried')\n"
        "torch.cuda.is_available = torch.cuda.get_device_capability = boom\n"
        "import importlib, nmoe.arch\n"
        "from nmoe.ops import registry\n"
        "for op in registry.op_names(): importlib.import_module('nmoe.ops.' + op)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reference_functions_are_public():
    for op in registry.op_names():
        module = __import__(f"nmoe.ops.{op}.reference", fromlist=["x"])
        assert sorted(module.__all__) == sorted(_contract(op)), op
        assert all(inspect.isfunction(getattr(module, name)) for name in module.__all__)


def test_a_checked_op_is_named_where_it_fails(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("NMOE_CHECK", "1")
    monkeypatch.setenv("NMOE_ARCH", "reference")
    checked = registry.implementation.__wrapped__("rms_norm")
    good, bad = torch.ones(2, 4), torch.ones(3)
    with pytest.raises(RuntimeError, match=r"NMOE_CHECK: in rms_norm.forward of \[\('torch.float32', 2, 4\), .* 3\)"):
        checked.forward(good, bad, eps=1e-6)
