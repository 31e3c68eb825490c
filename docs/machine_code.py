# SPDX-License-Identifier: Apache-2.0
"""The table of docs/kernels.md that is read from machine code: registers, shared memory and stack of moonlet's kernels.

`uv run python docs/machine_code.py` compiles them for both chips, needs no GPU, and writes the table between its markers.
With `--check CHIP` it only says where the chip's column differs from what is compiled, with exit status 1.
"""

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from nmoe.commands import enter
from nmoe.config import load_config
from nmoe.train.warm_up import warm_up

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "kernels.md"
CHIPS = ("sm_90a", "sm_100a")
_GROUPED = [
    "attention.kind=gqa",
    "attention.kv_lora_rank=0",
    "attention.num_kv_heads=4",
    "attention.qk_nope_head_dim=64",
]
RUNS: list[tuple[list[str], int]] = [
    ([], 1),
    (["optim.kind=muon", "rdep.wire=mxfp8"], 8),
    (["rdep.wire=nvfp4", *_GROUPED], 8),
]
"""What is set beside the config, and ranks: together they use every op whose kernels are kept on disk."""
BEGIN, END = "<!-- machine code: made by docs/machine_code.py -->\n", "<!-- end -->"
_ELF, _CUDA, _X86_64 = b"\x7fELF", 190, 62  # magic of an object, and the machine numbers in its header
# movq $immediate, offset(base): the offset has one byte or four, and a base of rsp or r12 needs a byte more.
_STORE_8_BYTES = rb"(?=[\x48\x49]\xc7(?:[\x80-\x83\x85-\x87]|\x84\x24).{4}(.{4})|[\x48\x49]\xc7(?:[\x40-\x43\x45-\x47]|\x44\x24).(.{4}))"
_MOST_SHARED = 227 << 10  # of a block, on either chip


def cubins(path: Path) -> list[bytes]:
    """The CUDA objects embedded in a compiled kernel."""
    data = path.read_bytes()
    starts = [match.start() for match in re.finditer(re.escape(_ELF), data)]
    return [data[start:] for start in starts if struct.unpack_from("<H", data, start + 18)[0] == _CUDA]


def launched_with(path: Path) -> list[int]:
    """Bytes of shared memory that the kernels of an object are launched with, rising; empty where they ask for none.

    The host's part of the object, which fills in the launch, is x86-64: the size is the one immediate that is stored as
    64 bits and is a whole number of 8 bytes. (Others are tile sizes less one, in descriptors of tensors.)
    """
    data = path.read_bytes()
    machine = struct.unpack_from("<H", data, 18)[0]
    assert machine == _X86_64, f"{path}: made on another kind of machine ({machine}); make the table on x86-64"
    stored = re.finditer(_STORE_8_BYTES, data, re.DOTALL)
    sizes = {struct.unpack("<I", match[1] or match[2])[0] for match in stored}
    return sorted(size for size in sizes if size and size % 8 == 0 and size <= _MOST_SHARED)


def tool(name: str, *arguments: str | Path) -> str:
    """Runs a disassembler from NVIDIA's package."""
    (binary,) = Path(sys.prefix).glob(f"lib/python*/site-packages/nvidia/*/bin/{name}")
    binary.chmod(0o755)
    environment = os.environ | {"PATH": f"{binary.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        [str(binary), *map(str, arguments)], env=environment, capture_output=True, text=True, check=True
    ).stdout


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def resources(path: Path) -> list[tuple[int, int]]:
    """Registers and bytes of stack of every kernel of an object."""
    found = []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        for data in cubins(path):
            Path(file.name).write_bytes(data)
            found += re.findall(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", "-res-usage", file.name))
    return [(int(registers), int(stack)) for registers, stack in found]


def _objects(chip: str) -> dict[Path, str]:
    """Object file -> kernel, of all `RUNS`."""
    found = {}
    for overrides, ranks in RUNS:
        config = load_config(ROOT / "configs" / "moonlet.toml", overrides)
        listed = warm_up(config, chip=chip, ranks=ranks, say=_say)
        found |= {listed.folder / place: name for place, name in listed.names.items()}
    return found


def column(chip: str) -> dict[str, str]:
    """Kernel -> registers of a thread, shared memory of a block in KiB, each of the least and of the most of that name,
    and the stack if there is one."""
    registers: dict[str, set[int]] = {}
    shared: dict[str, set[int]] = {}
    stacks: dict[str, int] = {}
    for path, name in _objects(chip).items():
        sizes, usage = launched_with(path), resources(path)
        assert len(sizes) <= len(usage), f"{path}: {len(usage)} kernels are launched with {sizes} bytes?"
        shared.setdefault(name, set()).update(sizes or [0])
        registers.setdefault(name, set()).update(used for used, _ in usage)
        stacks[name] = max(stacks.get(name, 0), *(stack for _, stack in usage))
    return {name: _cell(found, shared[name], stacks[name]) for name, found in registers.items()}


def _cell(registers: set[int], shared: set[int], stack: int) -> str:
    text = _span([f"{number}" for number in sorted(registers)])
    if max(shared):
        text += f"; {_span([f'{size / 1024:.3g}' for size in sorted(shared)])} KiB"
    return text + (f"; stack {stack}" if stack else "")


def _span(rising: list[str]) -> str:
    return rising[0] if rising[0] == rising[-1] else f"{rising[0]} to {rising[-1]}"


def main() -> int:
    """Writes the table, or compares it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", choices=CHIPS, help="compare only")
    chip = parser.parse_args().check
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    if chip:
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
        written = {cells[0].strip("`"): cells[1 + CHIPS.index(chip)] for cells in rows}
        compiled = column(chip)
        names = sorted(written.keys() | compiled.keys())
        wrong = [name for name in names if written.get(name, "") != compiled.get(name, "")]
        for name in wrong:
            sys.stdout.write(f"{PAGE.name}: {name}: {written.get(name)}, compiled for {chip}: {compiled.get(name)}\n")
        return 1 if wrong else 0
    columns = [column(chip) for chip in CHIPS]
    lines = [f"| kernel | {' | '.join(CHIPS)} |", "|---|---|---|"]
    for name in sorted({*columns[0], *columns[1]}):
        lines.append(f"| `{name}` | {' | '.join(cells.get(name, '') for cells in columns)} |")
    PAGE.write_text(f"{before}{BEGIN}" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
