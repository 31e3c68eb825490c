# SPDX-License-Identifier: Apache-2.0
"""`nmoe-doctor [CONFIG]`: whether this machine can run what a config asks, one line a check.

A line begins with `ok`, with `--` (not here, and not asked for; what would need it stands beside it) or with `no` (asked
for and not here; what to do stands behind it). Exit status 2 where there is a `no`. What can be tried is tried: a handle
is mapped by another process, NVSHMEM is started, bytes are copied and timed.
"""

import argparse
import importlib.metadata
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import nmoe
from nmoe.arch import Arch, arch_on
from nmoe.comm import probe
from nmoe.config import Config, load_config
from nmoe.errors import ConfigError, EnvironmentFault
from nmoe.status import exit_status
from nmoe.words import size

__all__ = ["Demand", "Finding", "demand_of", "doctor_parser", "examine", "main"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    mark: Literal["ok", "--", "no"]
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.mark:2}  {self.subject:<18}  {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a config needs of this machine.

    Attributes:
        ranks: of an expert-parallel group; `node_size` of them, a divisor, map each other's memory (0: all).
        comm: communicator by name (`parallel.comm`, auto decided); empty where nothing asks for one.
        symmetric_bytes: that a rank shares with its peers.
        peak_bytes: of a rank at the moment of most (`nmoe-train --dry-run` says what they are).
    """

    ranks: int = 1
    node_size: int = 0
    comm: str = ""
    symmetric_bytes: int = 0
    peak_bytes: int = 0


def demand_of(config: Config | None, *, gpus: int) -> Demand:
    """What `config` asks for on a machine with so many GPUs, one rank each; None asks for nothing."""
    if config is None:
        return Demand()
    from nmoe.rdep.size import shared_bytes
    from nmoe.train.memory import plan_memory

    ranks, comm = config.parallel.ep or math.gcd(max(gpus, 1), config.moe.num_experts), config.parallel.comm
    node = config.rdep.node_size or (gpus if 0 < gpus < ranks and ranks % gpus == 0 else ranks)
    if comm == "auto":
        comm = "local" if ranks == 1 else "shm" if not gpus else "nvshmem" if node < ranks else "ipc"
    return Demand(
        ranks=ranks,
        node_size=node,
        comm=comm,
        symmetric_bytes=shared_bytes(config, ranks=ranks, node_size=node if ranks % node == 0 else ranks),
        peak_bytes=plan_memory(config, kernels=config.train.dtype == "bf16", ranks=max(gpus, 1)).peak,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gpu:
    name: str
    arch: Arch | None
    problem: str
    total: int
    free: int


_PACKAGES = (
    ("torch", "everything that trains"),
    ("nvidia-cutlass-dsl", "kernels"),
    ("quack-kernels", "the experts' products on a GPU"),
    ("nvidia-ml-py", "driver and NVLink in this report, GPU figures of a run"),
    ("nvshmem4py-cu13", 'parallel.comm = "nvshmem"'),
)
_OPTIONAL = {"nvidia-ml-py", "nvshmem4py-cu13"}


def examine(demand: Demand) -> Iterator[Finding]:
    """All checks, in an order in which each may rely on those before it."""
    missing = set[str]()
    for package, finding in _packages(demand):
        missing |= {package} if finding.mark != "ok" else set()
        yield finding
    yield _shared_memory(demand)
    if 0 < demand.node_size < demand.ranks:
        yield _nodes(demand)
    if "torch" in missing:
        return
    gpus = _gpus()
    if not gpus:
        yield _no_gpu(demand)
        if demand.peak_bytes:
            yield _host_memory(demand)
        return
    yield from _driver()
    yield from _describe(gpus)
    yield from _kernels(gpus, demand)
    yield from _memory(gpus, demand)
    if len(gpus) < demand.ranks and demand.comm == "ipc":
        yield Finding(
            mark="no",
            subject="GPUs",
            text=f"{len(gpus)} here, {demand.ranks} expert-parallel ranks asked for; set parallel.ep to at most {len(gpus)}",
        )
    yield from _links(len(gpus))
    yield from _mappings(len(gpus), demand)
    if "nvshmem4py-cu13" not in missing:
        yield _nvshmem(demand)


def _packages(demand: Demand) -> Iterator[tuple[str, Finding]]:
    optional = _OPTIONAL - ({"nvshmem4py-cu13"} if demand.comm == "nvshmem" else set())
    for package, purpose in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            text = f"not installed; needed for {purpose}: install nmoe-core[train]"
            yield package, Finding(mark="--" if package in optional else "no", subject=package, text=text)
        else:
            yield package, Finding(mark="ok", subject=package, text=version)


def _shared_memory(demand: Demand) -> Finding:
    try:
        free = probe.map_shared_memory()
    except OSError as error:
        text = f'memfd_create: {error.strerror}; parallel.comm = "shm" needs it (Linux 3.17, and a container that allows it)'
        return Finding(mark="no" if demand.comm == "shm" else "--", subject="shared memory", text=text)
    needed = demand.ranks * demand.symmetric_bytes if demand.comm == "shm" else 0
    text = f"{size(free)} available" + (f", {size(needed)} needed by {demand.ranks} ranks" if needed else "")
    if needed > free:
        text += "; set train.micro_batch_size or parallel.ep lower"
        return Finding(mark="no", subject="shared memory", text=text)
    return Finding(mark="ok", subject="shared memory", text=text)


def _nodes(demand: Demand) -> Finding:
    size, how = (
        demand.node_size,
        "puts of NVSHMEM, which have run inside one node alone" if demand.comm == "nvshmem" else "copies",
    )
    text = f"{demand.ranks // size} of {size} ranks, experts shared by {demand.ranks}; between nodes {how}"
    return Finding(mark="ok", subject="nodes", text=text)


def _no_gpu(demand: Demand) -> Finding:
    if demand.comm in ("ipc", "nvshmem"):
        text = f'none; parallel.comm = "{demand.comm}" needs them: run on a machine with GPUs, or set it to "shm"'
        return Finding(mark="no", subject="GPUs", text=text)
    if problem := arch_on(None)[1]:
        return Finding(mark="no", subject="GPUs", text=problem)
    text = 'none: plain torch on the CPU, between ranks "shm"; kernels, "ipc" and "nvshmem" need H100, H200 or B200'
    return Finding(mark="--", subject="GPUs", text=text)


def _host_memory(demand: Demand) -> Finding:
    """Without a GPU the run lies in the memory of the machine."""
    free = probe.available_memory()
    text = f"{size(demand.peak_bytes)} at the moment of most, {size(free)} available without a GPU"
    if demand.peak_bytes <= free:
        return Finding(mark="ok", subject="memory", text=text)
    return Finding(
        mark="no", subject="memory", text=f"{text}; nmoe-train --dry-run says how many GPUs the config needs"
    )


def _count_gpus() -> int:
    try:
        import torch
    except ImportError:  # which the report then says
        return 0
    return torch.cuda.device_count()


def _gpus() -> list[_Gpu]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        arch, problem = arch_on(torch.cuda.get_device_capability(index))
        free, total = torch.cuda.mem_get_info(index)
        found.append(_Gpu(name=name, arch=arch, problem=problem, total=total, free=free))
    return found


def _driver() -> Iterator[Finding]:
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        driver, supported = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()
    except Exception as error:  # noqa: BLE001  a broken library is a finding, like a missing one
        yield Finding(mark="--", subject="driver", text=f"version unknown ({error}); install nvidia-ml-py")
        return
    built = torch.version.cuda or "none"
    text = f"{driver} (CUDA {supported // 1000}.{supported % 1000 // 10}), PyTorch is built for CUDA {built}"
    if built == "none" or int(built.split(".")[0]) > supported // 1000:
        yield Finding(mark="no", subject="driver", text=f"{text}; install a driver for CUDA {built} or such a PyTorch")
    else:
        yield Finding(mark="ok", subject="driver", text=text)


def _describe(gpus: list[_Gpu]) -> Iterator[Finding]:
    for index, gpu in enumerate(gpus):
        text = f"{gpu.name}, {size(gpu.total)}, {size(gpu.free)} free"
        if gpu.arch is None:
            yield Finding(mark="no", subject=f"GPU {index}", text=f"{text}; {gpu.problem}")
        else:
            served = f"kernels for {gpu.arch.target}" if gpu.arch.target else "plain torch, as NMOE_ARCH says"
            yield Finding(mark="ok", subject=f"GPU {index}", text=f"{text}, {served}")


def _kernels(gpus: list[_Gpu], demand: Demand) -> Iterator[Finding]:
    from nmoe.ops import registry

    for arch in {gpu.arch.name: gpu.arch for gpu in gpus if gpu.arch}.values():
        lacking = [op for op in registry.op_names() if registry.source_file(op, on=arch) is None]
        if lacking:
            text = f"none for {', '.join(lacking)} on {arch.name}; NMOE_ARCH=reference runs plain torch instead"
            yield Finding(mark="no" if demand.peak_bytes else "--", subject="kernels", text=text)
        else:
            yield Finding(mark="ok", subject="kernels", text=f"every op has its file for {arch.name}")


def _memory(gpus: list[_Gpu], demand: Demand) -> Iterator[Finding]:
    if not demand.peak_bytes:
        return
    free = min(gpu.free for gpu in gpus)
    text = f"{size(demand.peak_bytes)} at the moment of most and {size(demand.symmetric_bytes)} shared with peers, "
    text += f"{size(free)} free"
    if demand.peak_bytes + demand.symmetric_bytes > free:
        text += "; set train.micro_batch_size lower or train.recompute, or use more ranks (nmoe-train --dry-run counts them)"
        yield Finding(mark="no", subject="memory", text=text)
    else:
        yield Finding(mark="ok", subject="memory", text=text)


def _links(count: int) -> Iterator[Finding]:
    """NVLink, peer access and measured bandwidth between each two GPUs."""
    import torch

    if count == 1:
        yield Finding(mark="--", subject="links", text="one GPU: no peers, no link to measure")
        return
    for index in range(count):
        links = _nvlinks(index)
        yield Finding(mark="ok" if links else "--", subject=f"NVLink {index}", text=_links_text(links))
    for source in range(count):
        reached = [peer for peer in range(count) if peer != source and torch.cuda.can_device_access_peer(source, peer)]
        unreached = sorted(set(range(count)) - set(reached) - {source})
        text = f"{source} reaches {reached or 'no other'}" + (f", not {unreached}" if unreached else "")
        yield Finding(mark="--" if unreached else "ok", subject="peer access", text=text)
    for source, target in zip(range(count), [*range(1, count), 0], strict=True):
        speed = probe.copy_bandwidth(source, target) / 1e9
        yield Finding(mark="ok", subject="bandwidth", text=f"{source} -> {target}: {speed:.0f} GB/s by the copy engine")


def _nvlinks(index: int) -> int | None:
    """Active NVLinks of a GPU; None where that cannot be asked."""
    try:
        import pynvml

        handle: Any = pynvml.nvmlDeviceGetHandleByIndex(index)
        active = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                active += pynvml.nvmlDeviceGetNvLinkState(handle, link)
            except pynvml.NVMLError:
                break
        return active
    except Exception:  # noqa: BLE001
        return None


def _links_text(links: int | None) -> str:
    if links is None:
        return "state unknown: NVML does not answer"
    return f"{links} links active" if links else "no link active: rows travel over PCIe, at a tenth of the speed"


def _mappings(count: int, demand: Demand) -> Iterator[Finding]:
    """CUDA IPC between each GPU and its next, tried for real; with one GPU, between two processes on it."""
    for owner in range(count):
        opener = (owner + 1) % count
        where = f"{owner} -> {opener}" if count > 1 else "two processes on one GPU"
        try:
            probe.open_in_child(owner, opener)
        except EnvironmentFault as fault:
            text = f"{where}: {fault}; containers need --ipc=host, and every rank has to see all GPUs"
            yield Finding(mark="no" if demand.comm == "ipc" else "--", subject="CUDA IPC", text=text)
        else:
            yield Finding(mark="ok", subject="CUDA IPC", text=f"{where}: mapped, read and written by another process")


def _nvshmem(demand: Demand) -> Finding:
    try:
        version = probe.start_nvshmem_in_child(0)
    except EnvironmentFault as fault:
        text = f"{fault}; NVSHMEM_DEBUG=INFO python -m nmoe.comm.probe nvshmem 0 says more"
        return Finding(mark="no" if demand.comm == "nvshmem" else "--", subject="NVSHMEM", text=text)
    return Finding(mark="ok", subject="NVSHMEM", text=f"{version} starts with one rank")


def _warm_up(config: Config | None, chip: str) -> Finding:
    """Compiles the kernels of a config for a chip, or for this machine's GPU."""
    if config is None:
        raise ConfigError("nmoe-doctor --warm-up: expected a CONFIG, whose kernels it compiles")
    if config.train.dtype != "bf16":
        text = f'none: train.dtype = "{config.train.dtype}" runs plain torch'
        return Finding(mark="--", subject="kernels", text=text)
    from nmoe.train.warm_up import CHIPS, warm_up

    gpus = _gpus()
    here = next((gpu.arch.target for gpu in gpus if gpu.arch and gpu.arch.target), None)
    if chip not in CHIPS and (chip or here is None):
        found = f"found {chip!r}" if chip else "no GPU with kernels here"
        raise EnvironmentFault(f"nmoe-doctor --warm-up: {found}; expected one of {', '.join(CHIPS)}")
    chip, began = chip or str(here), time.perf_counter()
    ranks = demand_of(config, gpus=len(gpus)).ranks
    listed = warm_up(config, chip=chip, ranks=ranks, say=_write)
    text = f"{len(listed.sums)} for {chip} in {listed.folder}, {time.perf_counter() - began:.1f} s"
    return Finding(mark="ok", subject="kernels", text=text)


def doctor_parser() -> argparse.ArgumentParser:
    """Arguments of `nmoe-doctor`."""
    parser = argparse.ArgumentParser(
        prog="nmoe-doctor",
        description="Say whether this machine can run what a config asks, one line a check: ok; -- (not here, not asked "
        "for); no, and what to do. Exit status 2 where there is a no.",
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="TOML file; without one the machine is described")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a key of the config; may be repeated",
    )
    parser.add_argument(
        "--warm-up",
        metavar="CHIP",
        nargs="?",
        const="",
        help="instead, compile every kernel that training CONFIG will use, for this machine's GPU or for CHIP (sm_90a, "
        "sm_100a, sm_103a), which need not be here; with parallel.ep for that many expert-parallel ranks",
    )
    parser.add_argument("--version", action="version", version=f"nmoe-core {nmoe.__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `nmoe-doctor`."""
    options = doctor_parser().parse_args(arguments)
    return exit_status(_report, options)


def _write(line: Finding | str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _report(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides) if options.config else None
    if options.warm_up is not None:
        _write(_warm_up(config, options.warm_up))
        return 0
    faults = 0
    for finding in examine(demand_of(config, gpus=_count_gpus())):
        _write(finding)
        faults += finding.mark == "no"
    return 2 if faults else 0
