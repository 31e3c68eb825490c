# SPDX-License-Identifier: Apache-2.0
"""The table of docs/kernels.md that is read from machine code: registers and stack of every kernel that moonlet uses.

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

from nmoe.config import load_config
from nmoe.train.warm_up import warm_up

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "kernels.md"
CHIPS = ("sm_90a", "sm_100a")
BEGIN, END = "<!-- machine code: made by docs/machine_code.py -->\n", "<!-- end -->"
_ELF, _CUDA = b"\x7fELF", 190  # magic of an object, and the machine number of CUDA code in its header


def cubins(path: Path) -> list[bytes]:
    """The CUDA objects embedded in a compiled kernel."""
    data = path.read_bytes()
    starts = [match.start() for match in re.finditer(re.escape(_ELF), data)]
    return [data[start:] for start in starts if struct.unpack_from("<H", data, start + 18)[0] == _CUDA]


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


def column(chip: str) -> dict[str, str]:
    """Kernel -> registers of a thread, of the least and of the most of that name, and the stack if there is one."""
    config = load_config(ROOT / "configs" / "moonlet.toml")
    listed = warm_up(config, chip=chip, ranks=1, say=_say)
    found: dict[str, list[tuple[int, int]]] = {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        for place, name in listed.names.items():
            for data in cubins(listed.folder / place):
                Path(file.name).write_bytes(data)
                usage = tool("cuobjdump", "-res-usage", file.name)
                numbers = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
                found.setdefault(name, []).extend((int(registers), int(stack)) for registers, stack in numbers)
    return {name: _cell(kernels) for name, kernels in found.items()}


def _cell(kernels: list[tuple[int, int]]) -> str:
    registers, stack = sorted(number for number, _ in kernels), max(size for _, size in kernels)
    text = f"{registers[0]}" if registers[0] == registers[-1] else f"{registers[0]} to {registers[-1]}"
    return text + (f", stack {stack}" if stack else "")


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
    sys.exit(main())
