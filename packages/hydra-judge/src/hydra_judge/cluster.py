# SPDX-License-Identifier: Apache-2.0
"""Work on numbered blocks in many processes, by an engine that is there already: Ray Data.

The blocks are on a file system that all processes see, and each leaves a marker when it is complete, so Ray has only
to call a function for each number. A process that dies takes the blocks with it that it was at; Ray calls the function
for them again, elsewhere.
"""

import logging
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra_judge.engine import StoppedError
from nmoe.errors import ConfigError, DataError, EnvironmentFault, NmoeError

__all__ = ["Cluster", "on_cluster"]

# A Ray Data task takes some rows; more tasks than this are a burden for its scheduler.
_MOST_TASKS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Where the work is done.

    Attributes:
        address: "local" for processes of this machine, "auto" for the cluster this machine belongs to, or HOST:PORT.
        workers: processes at the most; None for one a CPU of the cluster.
    """

    address: str
    workers: int | None = None


def on_cluster(
    work: Callable[[int], Mapping[str, float]], numbers: Sequence[int], *, cluster: Cluster, quiet: bool
) -> Counter[str]:
    """Calls `work` for every number, in processes of a cluster.

    Args:
        work: does one piece and returns what is to be added up; a piece may be done again, and by another process.
        numbers: the pieces.
        cluster: where.
        quiet: no progress on standard error.

    Returns:
        The sums of what `work` returned.

    Raises:
        NmoeError: the first that `work` raised.
        EnvironmentFault: if there is no Ray, or no such cluster.
    """
    totals: Counter[str] = Counter()
    if not numbers:
        return totals
    data = _connect(cluster)
    began = said = time.monotonic()
    try:
        rows = data.from_items(list(numbers), override_num_blocks=min(len(numbers), _MOST_TASKS))
        found = rows.map(_guarded(work), compute=data.TaskPoolStrategy(size=cluster.workers))
        for count, row in enumerate(found.iter_rows(), start=1):
            if row["error"]:
                raise _error(row["kind"], row["error"])
            totals.update(dict(row["sums"]))
            if not quiet and (time.monotonic() > said + 10 or count == len(numbers)):
                said = time.monotonic()
                left = int((said - began) * (len(numbers) - count) / count)
                eta = f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
                sys.stderr.write(f"{count} of {len(numbers)} blocks  {totals['documents']:.0f} documents  {eta}\n")
    finally:
        import ray

        ray.shutdown()
    return totals


def _connect(cluster: Cluster) -> Any:
    """Starts or joins Ray, quietly; returns `ray.data`."""
    # Read when Ray is imported. It reports its use to its makers and copies the working folder of `uv run` to every
    # host, unasked.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    if cluster.address == "local":
        # Its ports listen on every address of this host and run what they are sent: only from holders of the token.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
        import ray.data
    except ImportError:
        raise EnvironmentFault("--ray: the package ray is missing; install hydra-judge[ray]") from None
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if cluster.address == "local":
            ray.init("local", include_dashboard=False, num_cpus=cluster.workers, **quiet)
        else:
            ray.init(cluster.address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EnvironmentFault(f"--ray {cluster.address}: no cluster there ({error})") from None
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray.data


def _guarded(work: Callable[[int], Mapping[str, float]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`work` for a row, with errors that a user can mend as values: Ray would wrap them in a traceback."""

    def one(row: dict[str, Any]) -> dict[str, Any]:
        try:
            sums = [(name, float(value)) for name, value in work(int(row["item"])).items()]
            return {"sums": sums, "error": "", "kind": ""}
        except NmoeError as error:
            return {"sums": [], "error": str(error), "kind": type(error).__name__}

    return one


def _error(kind: str, message: str) -> NmoeError:
    kinds = {one.__name__: one for one in (StoppedError, ConfigError, DataError, EnvironmentFault)}
    return kinds.get(kind, NmoeError)(message)
