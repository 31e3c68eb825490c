# SPDX-License-Identifier: Apache-2.0
"""Tables of the README that are computed, not written: the configs, and which op runs where.

`uv run python docs/tables.py` rewrites them between their markers; a test fails when they are out of date.
"""

import sys
from pathlib import Path

from nmoe.config import load_config
from nmoe.model.params import count_parameters
from nmoe.ops.registry import op_names

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
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


# What a GPU has yet to run on sm_90a: an op goes from here when its tests have passed there.
_NOT_RUN: dict[str, str] = dict.fromkeys(("adamw", "gram", "wire"), "compiles, not run")
_NOT_RUN |= dict.fromkeys(("combine", "grouped_gemm", "route_topk"), "runs; its newest parts compile, not run")


def support() -> str:
    """Op by chip. `sm_100a` code is compiled in CI and has not been run."""
    lines = ["| op | CPU | H100, H200 (sm_90a) | B200 (sm_100a) |", "|---|---|---|---|"]
    for op in op_names():
        files = {path.stem for path in (OPS / op).glob("*.py")}
        hopper = _NOT_RUN.get(op, "runs") if files & {"sm90a", "cuda"} else "missing"
        blackwell = "compiles, not run" if files & {"sm100a", "cuda"} else "missing"
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
