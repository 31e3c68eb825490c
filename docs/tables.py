# SPDX-License-Identifier: Apache-2.0
"""Tables of the README that are computed, not written: the configs, and which op runs where.

`uv run python docs/tables.py` rewrites them between their markers; a test fails when they are out of date.
"""

import re
import sys
from pathlib import Path

from nmoe.config import load_config
from nmoe.model.params import count_parameters
from nmoe.ops.registry import op_names

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
KERNELS = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- machine code: made by docs/machine_code.py -->\n", "<!-- end -->"
OPS = ROOT / "packages" / "nmoe-core" / "src" / "nmoe" / "ops"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


def configs() -> str:
    """One row for each file under configs/, smallest model first."""
    loaded = [(path.stem, load_config(path)) for path in (ROOT / "configs").glob("*.toml")]
    loaded.sort(key=lambda pair: count_parameters(pair[1])[0])
    lines = [
        "| config | parameters | active | layers (dense) | width | experts + shared, top-k | scoring |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, config in loaded:
        total, active = count_parameters(config)
        model, moe = config.model, config.moe
        lines.append(
            f"| [{name}](configs/{name}.toml) | {_billions(total)} | {_billions(active)} | {model.num_layers} ({model.num_dense_layers}) "
            f"| {model.hidden_size} | {moe.num_experts} + {moe.num_shared_experts}, {moe.top_k} | {moe.scoring} |"
        )
    return "\n".join(lines)


_NOT_RUN: set[str] = set()  # ops whose tests have yet to pass on an sm_90a
_NO_OBJECT = {"ship"}  # NVSHMEM's functions are linked into its kernel when it is loaded; tests compile it


def _machine_code() -> dict[str, tuple[str, str]]:
    """Op -> what its kernels use on either chip, from the table that docs/machine_code.py makes by compiling them."""
    cells: dict[str, list[tuple[str, str]]] = {}
    for line in KERNELS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines()[2:]:
        name, *chips = (cell.strip() for cell in line.split("|")[1:-1])
        cells.setdefault(name.strip("`").split()[0], []).append((chips[0], chips[1]))
    return {op: (_most([a for a, _ in rows]), _most([b for _, b in rows])) for op, rows in cells.items()}


def _most(cells: list[str]) -> str:
    """The largest numbers of a column's cells: "168 registers, 227 KiB"."""
    found = [re.match(r"(?:\d+ to )?(\d+)(?:; (?:[\d.]+ to )?([\d.]+) KiB)?", cell) for cell in cells if cell]
    registers = max(int(match[1]) for match in found if match)
    shared = max(float(match[2] or 0) for match in found if match)
    return f"{registers} registers" + (f", {shared:g} KiB" if shared else "")


def support() -> str:
    """Op by chip. `sm_100a` code is compiled in CI and has not been run."""
    lines = ["| op | CPU | H100, H200 (sm_90a) | B200 (sm_100a) |", "|---|---|---|---|"]
    used = _machine_code()
    for op in op_names():
        files = {path.stem for path in (OPS / op).glob("*.py")}
        hopper = ("compiles, not run" if op in _NOT_RUN else "runs") if files & {"sm90a", "cuda"} else "missing"
        blackwell = "compiles, not run" if files & {"sm100a", "cuda"} else "missing"
        if op not in _NO_OBJECT:
            assert op in used, f"docs/kernels.md: no kernel of {op}; run docs/machine_code.py"
            hopper, blackwell = f"{hopper}; {used[op][0]}", f"{blackwell}; {used[op][1]}"
        lines.append(f"| `{op}` | {'reference' if 'reference' in files else 'missing'} | {hopper} | {blackwell} |")
    return "\n".join(lines)


TABLES = {"configs": configs, "support": support}


def updated(text: str) -> str:
    """The README's text with every table computed anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: made by docs/tables.py -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        assert found, f"README.md has no place for the table {name!r}"
        text = before + begin + make() + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stderr.write("README.md: tables are up to date\n")
