# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles to machine code for both chips without a GPU, uses its tensor cores, and spills nothing."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe.config import load_config
from nmoe.errors import EnvironmentFault
from nmoe.train import warm_up as warming

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]
ARCHS = {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA"}
PRODUCTS = {"sm_90a": 11, "sm_100a": 10}  # with gathered rows and with rows in slot order; equal tiles are one kernel
SYMMETRIC = 3
_ELF, _CUDA = b"\x7fELF", 190  # magic of an object, and the machine number of CUDA code in its header


def cubins(folder: Path) -> list[bytes]:
    """The CUDA objects of a folder: embedded in compiled kernels, or by themselves."""
    found = []
    for path in sorted([*folder.rglob("*.o"), *folder.rglob("*.cubin")]):
        data = path.read_bytes()
        starts = [match.start() for match in re.finditer(re.escape(_ELF), data)]
        found += [data[start:] for start in starts if struct.unpack_from("<H", data, start + 18)[0] == _CUDA]
    return found


def tool(name: str, *arguments: str | Path) -> str:
    """Runs a disassembler from NVIDIA's package."""
    (binary,) = Path(sys.prefix).glob(f"lib/python*/site-packages/nvidia/*/bin/{name}")
    binary.chmod(0o755)
    environment = os.environ | {"PATH": f"{binary.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        [str(binary), *map(str, arguments)], env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module", params=ARCHS)
def compiled(request, tmp_path_factory):
    """(arch, cubin files) of every kernel; their folder is the parent of the files."""
    folder = tmp_path_factory.mktemp(request.param)
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"NMOE_CACHE": str(folder), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, str(script), request.param], env=environment, capture_output=True, text=True, timeout=800
    )
    assert result.returncode == 0, result.stderr[-4000:]
    files = []
    for number, data in enumerate(cubins(folder)):
        files.append(folder / f"{number}.cubin")
        files[-1].write_bytes(data)
    return request.param, files


def test_every_kernel_compiles_for_the_chip(compiled):
    arch, files = compiled
    assert len(files) >= 39 + PRODUCTS[arch] + SYMMETRIC + 4  # of this project, grouped products, Muon's, attention
    sass = [tool("cuobjdump", "-sass", path) for path in files]
    assert all(f"arch = {arch}" in text or f"code for {arch}" in text for text in sass), sass[0][:400]
    assert sum(ARCHS[arch] in text for text in sass) == PRODUCTS[arch] + SYMMETRIC + 2, (
        "the products do not use this chip's tensor cores"
    )


def with_nvshmem(path: Path) -> bool:
    """Whether NVSHMEM's device functions are linked into a kernel, and with them the state that is filled in when it is loaded."""
    return b"nvshmemi_device_state_d" in path.read_bytes()


def test_kernels_that_put_hold_the_functions_of_nvshmem(compiled):
    """ptxas has resolved them all; the kernels of several nodes differ from the others of their op by that alone."""
    _, files = compiled
    code = [tool("cuobjdump", "-sass", path) for path in files if with_nvshmem(path)]
    assert sum("ship_kernel" in text for text in code) == 1
    assert sum("meet_kernel" in text for text in code) == 2
    assert len(code) == 3


def test_no_kernel_spills(compiled):
    _, files = compiled
    files = [path for path in files if not with_nvshmem(path)]  # whose functions print errors from a stack of their own
    usage = [tool("cuobjdump", "-res-usage", path) for path in files]
    stacks = [(text, int(size)) for text in usage for size in re.findall(r"STACK:(\d+)", text)]
    assert len(stacks) >= len(files)
    assert not any(size for text, size in stacks if "flash_attn" not in text)
    assert max(size for _, size in stacks) <= 24  # flash-attn-4's backward on sm_100a


def warm_up(arch: str, folder: Path) -> str:
    """What is said while the kernels of a config are compiled, on a machine whose owner has other plans for quack's."""
    elsewhere = {"QUACK_CACHE_DIR": str(folder / "quack"), "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder / "flash")}
    off = {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    environment = os.environ | {"NMOE_CACHE": str(folder), "PYTHONWARNINGS": "ignore"} | elsewhere | off
    command = [
        f"{sys.prefix}/bin/nmoe-doctor",
        "configs/moonlet.toml",
        "--set",
        "train.batch_size=8",
        "--warm-up",
        arch,
    ]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True).stdout


def test_the_kernels_of_a_config_are_compiled_before_it_runs(compiled):
    """From shapes alone, what is on disk is found, and what is damaged there is seen."""
    arch, files = compiled
    folder = files[0].parent
    said = warm_up(arch, folder)
    (number, found), *_ = re.findall(r"compiling (\d+) kernels .* (\d+) found", said)
    # The fixture asked for these directly: the same kernel has the same name, whoever asks.
    assert int(found) >= 18
    assert f"ok  kernels             {int(number) + int(found)} for {arch}" in said
    objects = sorted((folder / "kernels" / arch).glob("[0-9a-f]*/*.o"), key=lambda path: path.stat().st_mtime)
    short, wrong = objects[-2:]  # of this config
    short.write_bytes(short.read_bytes()[:-1])
    wrong.write_bytes(wrong.read_bytes()[:999] + b"x" + wrong.read_bytes()[1000:])
    said = warm_up(arch, folder)
    assert all(f"{path}: damaged" in said for path in (short, wrong))
    assert f"compiling 2 kernels for {arch}" in said
    assert len(warm_up(arch, folder).splitlines()) == 1  # nothing is left to do

    script = Path(__file__).parents[2] / "docs" / "machine_code.py"
    environment = os.environ | {"NMOE_CACHE": str(folder)}
    table = subprocess.run(
        [sys.executable, script, "--check", arch], env=environment, capture_output=True, text=True, check=False
    )
    assert table.returncode == 0, f"{table.stdout}{table.stderr}run: uv run python docs/machine_code.py"


def test_the_optimizers_kernel_does_to_an_element_what_plain_torch_does():
    """Its arithmetic runs on this processor: of 20,000 moments a handful lie within a rounding of fp32 of the next bf16."""
    script = Path(__file__).with_name("adamw_host.py")
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    error, *different = result.stdout.split()
    first, second, unmoved = map(int, different)
    assert float(error) < 3e-6
    assert max(first, second) <= 20
    assert unmoved < 2000, "moments that do not change would compare as equal"


def test_what_stops_a_listing_is_said_in_one_line_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("NMOE_CACHE", str(tmp_path))
    config = load_config(Path(__file__).parents[2] / "configs" / "quickstart.toml")  # fp32, which no kernel takes
    with pytest.raises(EnvironmentFault, match=r"found torch\.float32.* \(in nmoe/ops/\w+/\w+\.py:\d+, \w+\)"):
        warming.warm_up(config, chip="sm_90a", ranks=1, say=print)
