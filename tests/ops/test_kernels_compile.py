# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles to machine code for both chips without a GPU, uses its tensor cores, and spills nothing."""

import os
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from nmoe.config import load_config
from nmoe.errors import EnvironmentFault
from nmoe.train import warm_up as warming

pytestmark = [pytest.mark.compile, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
ARCHS = {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA"}
SPECIFIC = {"sm_90a": 4, "sm_100a": 2}  # in the first byte of an object's flags: what is no plain sm_90 or sm_100
DAMAGED = "sm_90a"  # whose objects are damaged
PRODUCTS = {"sm_90a": 11, "sm_100a": 10}  # with gathered rows and with rows in slot order; equal tiles are one kernel
SYMMETRIC = 3
_ELF, _CUDA = b"\x7fELF", 190  # magic of an object, and the machine number of CUDA code in its header
_FLAGS = 48  # where the flags are in the header, of which the second byte is the chip's number


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


def compiled_by_hand(arch: str, folder: Path) -> list[Path]:
    """Cubin files of every kernel, which is compiled into the folder."""
    script = Path(__file__).with_name("compile_kernels.py")
    result = subprocess.run(
        [sys.executable, str(script), arch], env=environment(folder), capture_output=True, text=True, timeout=3000
    )
    assert result.returncode == 0, result.stderr[-4000:]
    files = []
    for number, data in enumerate(cubins(folder)):
        files.append(folder / f"{number}.cubin")
        files[-1].write_bytes(data)
    return files


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"NMOE_CACHE": str(folder), "PYTHONWARNINGS": "ignore"}


def warm_up(arch: str, folder: Path) -> str:
    """What is said while the kernels of a config are compiled, on a machine whose owner has other plans for quack's."""
    elsewhere = {"QUACK_CACHE_DIR": str(folder / "quack"), "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder / "flash")}
    off = {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    command = [f"{sys.prefix}/bin/nmoe-doctor", "configs/moonlet.toml"]
    command += ["--set", "train.batch_size=8", "--warm-up", arch]
    return subprocess.run(
        command,
        env=environment(folder) | elsewhere | off,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=1500,
    ).stdout


def damage(arch: str, folder: Path) -> tuple[Path, Path]:
    """The objects that were compiled last, for a config: one is cut off, one has another byte."""
    objects = sorted((folder / "kernels" / arch).glob("[0-9a-f]*/*.o"), key=lambda path: path.stat().st_mtime)
    short, wrong = objects[-2:]
    short.write_bytes(short.read_bytes()[:-1])
    wrong.write_bytes(wrong.read_bytes()[:999] + b"x" + wrong.read_bytes()[1000:])
    return short, wrong


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was compiled for a chip, and what was said and found on the way."""

    arch: str
    files: list[Path]
    usage: list[str]
    """Registers and stack of each file."""
    damaged: tuple[Path, ...]
    said: list[str]
    """At the warm-up, at the one after the damage, and at one more: for one chip, since they treat all alike."""
    table: subprocess.CompletedProcess[str]
    """The comparison of what is compiled with docs/kernels.md."""


def make(arch: str, folder: Path) -> Made:
    files = compiled_by_hand(arch, folder)
    usage = [tool("cuobjdump", "-res-usage", path) for path in files]
    damaged, said = (), list[str]()
    if arch == DAMAGED:
        said.append(warm_up(arch, folder))
        damaged = damage(arch, folder)
        said += [warm_up(arch, folder), warm_up(arch, folder)]
    script = ROOT / "docs" / "machine_code.py"
    table = subprocess.run(
        [sys.executable, script, "--check", arch],
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=2500,
    )
    return Made(arch=arch, files=files, usage=usage, damaged=damaged, said=said, table=table)


@pytest.fixture(scope="module")
def chips(request, tmp_path_factory) -> dict[str, Made]:
    """All chips that a chosen test asks for, side by side: nearly all is done by one process after another."""
    chosen = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    archs = [arch for arch in ARCHS if any(params.get("made") == arch for params in chosen)]
    with ThreadPoolExecutor(len(archs)) as pool:
        return dict(zip(archs, pool.map(make, archs, [tmp_path_factory.mktemp(arch) for arch in archs]), strict=True))


@pytest.fixture(params=ARCHS)
def made(request, chips) -> Made:
    return chips[request.param]


def test_every_kernel_compiles_for_the_chip(made):
    data = [path.read_bytes() for path in made.files]
    number = int(made.arch[3:-1])
    assert len(data) >= 39 + PRODUCTS[made.arch] + SYMMETRIC + 4  # of this project, products, Muon's, attention
    assert {(one[_FLAGS], one[_FLAGS + 1]) for one in data} == {(SPECIFIC[made.arch], number)}
    products = [
        path for path, one in zip(made.files, data, strict=True) if re.search(rb"TiledMMA|flash_[fb]wd_sm", one)
    ]
    assert len(products) == PRODUCTS[made.arch] + SYMMETRIC + 2
    for path in products:
        assert ARCHS[made.arch] in tool("cuobjdump", "-sass", path), f"{path} does not use this chip's tensor cores"


def with_nvshmem(path: Path) -> bool:
    """Whether NVSHMEM's device functions are linked into a kernel, and with them the state that is filled in when it is loaded."""
    return b"nvshmemi_device_state_d" in path.read_bytes()


def test_kernels_that_put_hold_the_functions_of_nvshmem(made):
    """ptxas has resolved them all; the kernels of several nodes differ from the others of their op by that alone."""
    usage = [text for path, text in zip(made.files, made.usage, strict=True) if with_nvshmem(path)]
    assert sum("ship_kernel" in text for text in usage) == 1
    assert sum("meet_kernel" in text for text in usage) == 2
    assert len(usage) == 3


def test_no_kernel_spills(made):
    # NVSHMEM's functions print errors from a stack of their own.
    usage = [text for path, text in zip(made.files, made.usage, strict=True) if not with_nvshmem(path)]
    stacks = [(text, int(size)) for text in usage for size in re.findall(r"STACK:(\d+)", text)]
    assert len(stacks) >= len(usage)
    assert not any(size for text, size in stacks if "flash_attn" not in text)
    assert max(size for _, size in stacks) <= 24  # flash-attn-4's backward on sm_100a


@pytest.mark.parametrize("made", [DAMAGED], indirect=True)
def test_the_kernels_of_a_config_are_compiled_before_it_runs(made):
    """From shapes alone, what is on disk is found, and what is damaged there is seen."""
    first, mended, last = made.said
    (number, found), *_ = re.findall(r"compiling (\d+) kernels .* (\d+) found", first)
    # Those that were compiled by hand: the same kernel has the same name, whoever asks.
    assert int(found) >= 18
    assert f"ok  kernels             {int(number) + int(found)} for {made.arch}" in first
    assert all(f"{path}: damaged" in mended for path in made.damaged)
    assert f"compiling 2 kernels for {made.arch}" in mended
    assert len(last.splitlines()) == 1  # nothing is left to do


def test_the_table_of_the_docs_is_what_is_compiled(made):
    assert made.table.returncode == 0, f"{made.table.stdout}{made.table.stderr}run: uv run python docs/machine_code.py"


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
    config = load_config(ROOT / "configs" / "quickstart.toml")  # fp32, which no kernel takes
    with pytest.raises(EnvironmentFault, match=r"found torch\.float32.* \(in nmoe/ops/\w+/\w+\.py:\d+, \w+\)"):
        warming.warm_up(config, chip="sm_90a", ranks=1, say=print)
