# SPDX-License-Identifier: Apache-2.0
"""The kernels of the routed experts one by one, in the order and heat of the layer, each beside its own roofline.

    python benchmarks/moe_products.py [--shape 0] [--zipf 1.0] [--tiles]
    python benchmarks/moe_products.py --waste           # needs no GPU

Every kernel runs once a round, rounds follow each other without a wait and 0.4 s of a dense product, so the chip is as hot
as in training. Prints milliseconds (median), TFLOP/s and TB/s, and the share of the roofline: the larger of FLOP over the
dense product's rate of this run and bytes over 4.3 TB/s. --tiles tries other tiles for every product, a different one each round, with rows
gathered and with rows in slot order; the table in ops/grouped_gemm/sm90a.py is made from that. --waste prints what the
chosen tiles compute for nothing: rows that fill up an expert's last tile, and multiprocessors that wait for the last one.
"""

import argparse
import heapq
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from moe_layer import SHAPES, dense

from nmoe.commands import enter

DEVICE, HALF, BANDWIDTH, SMS = "cuda", torch.bfloat16, 4.3e12, 132
PINGPONG = [(128, 128), (128, 160), (128, 192), (192, 128), (64, 256), (64, 192), (64, 128)]
COOPERATIVE = [(128, 256), (128, 224), (256, 128), (256, 160), (256, 192)]


@dataclass(kw_only=True)
class Case:
    """One kernel of the sequence: how to run it, and what it must do at least."""

    name: str
    run: Callable[[], object]
    flop: float = 0.0
    bytes: float = 0.0


def choices(shape: tuple[int, ...], zipf: float, device: str) -> torch.Tensor:
    """[T, K] experts, different ones for each token, popularity falling as rank^-zipf."""
    tokens, _, _, experts, top_k = shape
    torch.manual_seed(0)
    popularity = -zipf * torch.arange(1, experts + 1, device=device).log()
    noise = torch.rand(tokens, experts, device=device).clamp(1e-9, 1 - 1e-6)
    return (popularity - (-noise.log()).log()).topk(top_k, dim=1).indices.int()


def sequence(shape: tuple[int, ...], zipf: float, tiles: bool) -> list[list[Case]]:
    """Groups of cases; of each group one runs in a round."""
    from nmoe.ops._cute import products
    from nmoe.ops._cute.products import GemmConfig
    from nmoe.ops.combine import cuda as ways
    from nmoe.ops.group import cuda as grouping
    from nmoe.ops.grouped_gemm import sm90a as gemm

    tokens, D, F, X, K = shape
    S = tokens * K
    expert, gate = choices(shape, zipf, DEVICE), torch.rand(tokens, K, device=DEVICE)
    groups = grouping.group(expert, gate, num_experts=X, num_slots=S)
    offset, index, slot = groups.offset_X, groups.index_S, groups.slot_RK
    x, dout = (torch.randn(tokens, D, device=DEVICE, dtype=HALF) for _ in range(2))
    w13 = torch.randn(X, 2 * F, D, device=DEVICE, dtype=HALF) * D**-0.5
    w2 = torch.randn(X, D, F, device=DEVICE, dtype=HALF) * F**-0.5
    x_S, dout_S = (ways.spread(rows, slot, num_slots=S) for rows in (x, dout))
    preact, act = gemm.up(x, w13, index, offset)
    y = gemm.down(act, w2, offset)
    dpreact, gated, _ = gemm.gated_backward(dout, w2, preact, groups.gate_S, index, offset)
    dx, dw13, dw2 = torch.empty_like(y), torch.empty_like(w13), torch.empty_like(w2)

    weights, narrow, wide, hidden = 2.0 * X * F * D, 2.0 * tokens * D, 2.0 * S * D, 2.0 * S * F
    small, large = 2.0 * S * F * D, 4.0 * S * F * D
    up, back = {"flop": large, "bytes": 2 * weights + 3 * hidden}, {"flop": small, "bytes": weights + 5 * hidden}
    thirteen, two = {"flop": large, "bytes": 2 * weights + 2 * hidden}, {"flop": small, "bytes": weights + hidden}
    copies = {"bytes": narrow + wide}

    def forms(name: str, run: Callable[[bool, GemmConfig | None], object], figures: dict) -> list[Case]:
        """A product with its chosen tile, or with all tiles and both forms of its rows."""
        in_slots = gemm.arrange(x, index, slot, w13, use={"up": "up", "dw13": "dw13"}.get(name, "dout"))[1] is None
        if not tiles:
            return [Case(name=f"{name}{' (slots)' if in_slots else ''}", run=lambda: run(in_slots, None), **figures)]
        return [
            Case(name=f"{name} {form} {tile[0]}x{tile[1]} {kind} {c}", run=lambda s=s, g=g: run(s, g), **figures)
            for s, form in ((False, "gathered"), (True, "slots"))
            for kind, tile, c in [*_tiles(s)]
            for g in [
                GemmConfig(
                    tile_m=tile[0],
                    tile_n=tile[1],
                    pingpong=kind == "pingpong",
                    cluster_m=c[0],
                    cluster_n=c[1],
                    is_dynamic_persistent=False,
                )
            ]
        ]

    def run_up(s: bool, g: GemmConfig | None) -> object:
        rows, where = (x_S, None) if s else (x, index)
        return products.up(rows, w13, where, offset, preact, act, g) if g else gemm.up(rows, w13, where, offset)

    def run_back(s: bool, g: GemmConfig | None) -> object:
        rows, where = (dout_S, None) if s else (dout, index)
        if g:
            return products.gated_backward(rows, w2, preact, groups.gate_S, where, offset, dpreact, gated, g)
        return gemm.gated_backward(rows, w2, preact, groups.gate_S, where, offset)

    def run_dw13(s: bool, g: GemmConfig | None) -> object:
        rows, where = (x_S, None) if s else (x, index)
        if g is None:
            return gemm.dw13(rows, dpreact, where, offset, out_X2FD=dw13)
        a, b, out = (dpreact, rows, dw13) if s else (rows, dpreact, dw13.mT)
        return products.weight_gradient(a, b, where, offset, out, g, accumulate=False)

    def run_dw2(s: bool, g: GemmConfig | None) -> object:
        rows, where = (dout_S, None) if s else (dout, index)
        if g is None:
            return gemm.dw2(rows, gated, where, offset, out_XDF=dw2)
        return products.weight_gradient(rows, gated, where, offset, dw2, g, accumulate=False)

    def plain(name: str, a, w, out, chosen, figures: dict) -> list[Case]:
        if not tiles:
            return [Case(name=name, run=chosen, **figures)]
        found = []
        for kind, tile, c in _tiles(True):
            g = GemmConfig(
                tile_m=tile[0],
                tile_n=tile[1],
                pingpong=kind == "pingpong",
                cluster_m=c[0],
                cluster_n=c[1],
                is_dynamic_persistent=False,
            )
            run = lambda g=g: products.product(a, w, offset, out, g)  # noqa: E731
            found.append(Case(name=f"{name} {tile[0]}x{tile[1]} {kind} {c}", run=run, **figures))
        return found

    return [
        [Case(name="copy of x", run=lambda: ways.spread(x, slot, num_slots=S), **copies)],
        forms("up", run_up, up),
        plain("down", act, w2.mT, y, lambda: gemm.down(act, w2, offset), {"flop": small, "bytes": weights + hidden + wide}),
        [Case(name="combine", run=lambda: ways.combine(y, slot, gate), **copies)],
        [Case(name="copy of dout", run=lambda: ways.spread(dout, slot, num_slots=S), **copies)],
        forms("gated backward", run_back, back),
        forms("dw2", run_dw2, two),
        forms("dw13", run_dw13, thirteen),
        plain("dx", dpreact, w13, dx, lambda: gemm.dx(dpreact, w13, offset), {"flop": large, "bytes": 2 * weights + 2 * hidden + wide}),
        [Case(name="combine of dx", run=lambda: ways.combine(dx, slot, None), **copies)],
    ]  # fmt: skip


def _tiles(in_slots: bool):
    """(kind, tile, cluster) of every candidate; gathered rows cannot be shared along n."""
    clusters = [(2, 1), (1, 2)] if in_slots else [(2, 1), (1, 1)]
    for kind, sizes in (("pingpong", PINGPONG), ("cooperative", COOPERATIVE)):
        yield from ((kind, tile, cluster) for tile, cluster in product(sizes, clusters))


def compile_all(groups: list[list[Case]]) -> None:
    """Runs every case once; one that cannot is taken out."""
    for group in groups:
        for case in [*group]:
            try:
                case.run()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - a tile that does not fit is skipped, and said so
                print(f"  {case.name}: {str(error).splitlines()[0][:100]}")
                group.remove(case)


def measure(groups: list[list[Case]], rounds: int) -> dict[str, tuple[Case, float]]:
    """Median of every case."""
    marks: dict[str, list] = {}
    for number in range(rounds * max(map(len, groups))):
        for group in groups:
            case = group[number % len(group)]
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            case.run()
            end.record()
            marks.setdefault(case.name, []).append((begin, end))
    torch.cuda.synchronize()
    cases = {case.name: case for group in groups for case in group}
    return {
        name: (cases[name], statistics.median(begin.elapsed_time(end) for begin, end in pairs[len(pairs) // 4 :]))
        for name, pairs in marks.items()
    }


def print_waste(shape: tuple[int, ...], zipf: float) -> None:
    """What the chosen tiles compute for nothing, in percent: filling up, and the last wave."""
    from nmoe.ops.grouped_gemm import sm90a as gemm

    _, D, F, X, _ = shape
    count = torch.bincount(choices(shape, zipf, "cpu").flatten(), minlength=X).tolist()
    slots = sum(count)
    tile_of = gemm._choose(slots, w2_XDF=torch.empty(X, D, F, dtype=HALF, device="meta"))
    cells = []
    for name, rows, columns in (
        ("up", 0, 2 * F),
        ("down", 0, D),
        ("gated_backward", 0, F),
        ("dx", 0, D),
        ("dw13", 2 * F, D),
        ("dw2", D, F),
    ):
        g = getattr(tile_of, name)
        across = math.ceil(columns / g.tile_n)
        if rows:  # of a weight: the slots are summed over, 64 at a time
            each = math.ceil(rows / g.tile_m) * across
            steps = [math.ceil(n / 64) for n in count]
            filled = sum(steps) * 64 / slots
            filled *= math.ceil(rows / g.tile_m) * g.tile_m / rows * across * g.tile_n / columns
            costs = [cost for cost in steps for _ in range(each)]
        else:
            tiles = [math.ceil(n / g.tile_m) for n in count]
            filled = sum(tiles) * g.tile_m / slots * across * g.tile_n / columns
            costs = [1] * (sum(tiles) * across)
        # Tiles go to the multiprocessors in turn, or each to the one that is free first; all wait for the one that ends last.
        busy = [sum(costs[first::SMS]) for first in range(SMS)]
        if g.is_dynamic_persistent:
            busy = [0] * SMS
            for cost in costs:
                heapq.heapreplace(busy, busy[0] + cost)
        cells.append(f"{name} {100 * (filled - 1):.1f} + {100 * (max(busy) * SMS / sum(busy) - 1):.1f}")
    print(f"T={shape[0]} D={D} F={F} E={X} K={shape[4]} zipf={zipf}: " + ", ".join(cells))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), action="append", help="index; may be repeated")
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of the experts' popularity")
    parser.add_argument("--tiles", action="store_true", help="try other tiles")
    parser.add_argument("--waste", action="store_true", help="only what the tiles compute for nothing")
    options = parser.parse_args()
    for number in options.shape or range(len(SHAPES)):
        shape = SHAPES[number]
        if options.waste:
            print_waste(shape, options.zipf)
            continue
        groups = sequence(shape, options.zipf, options.tiles)
        compile_all(groups)
        rate = dense(256) * 1e12
        print("T={} D={} F={} E={} K={}".format(*shape), f"zipf={options.zipf}, dense {rate / 1e12:.0f} TFLOP/s")
        for case, ms in measure(groups, rounds=8).values():
            roof = max(case.flop / rate, case.bytes / BANDWIDTH) * 1e3
            print(f"  {case.name:44s} {ms:7.3f} ms {case.flop / ms / 1e9:5.0f} TFLOP/s {case.bytes / ms / 1e9:5.2f} TB/s {roof / ms:.2f}")  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
