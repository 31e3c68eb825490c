# SPDX-License-Identifier: Apache-2.0
"""Command-line options that several verbs share."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hydra_judge.cache import default_cache_path
from hydra_judge.cluster import Cluster
from hydra_judge.rubric import shipped_rubrics
from hydra_judge.session import Servers
from hydra_judge.verdict import FORMS
from nmoe.errors import ConfigError
from nmoe.formats.documents import MAX_DOCUMENT_BYTES

__all__ = [
    "FILE",
    "FOLDER",
    "Number",
    "judge_options",
    "reading_options",
    "request_options",
    "server_options",
    "sharing_options",
    "take_servers",
    "take_sharing",
]


class Number(click.FloatRange):
    """A finite number in a range. Comparisons with nan are false, so a limit of nan would be none, and a bill without end."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)

Decorator = Callable[[Any], Any]


def _apply(options: list[Decorator]) -> Decorator:
    """One decorator from several, in the order of the help."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def server_options() -> Decorator:
    """Options of every verb that asks a server."""
    option = click.option
    return _apply(
        [
            option(
                "--base-url",
                "urls",
                multiple=True,
                metavar="URL[#weight=W]",
                help="Server that speaks the OpenAI protocol, such as http://localhost:8000/v1; may be repeated, W is "
                "its share of the load. Required: documents go nowhere else.",
            ),
            option("--model", required=True, metavar="NAME", help="Model, by the name that the server knows."),
            option(
                "--api-key-env",
                default="OPENAI_API_KEY",
                show_default=True,
                metavar="NAME",
                help="Environment variable that holds the API key.",
            ),
            option(
                "--concurrency",
                type=click.IntRange(1, 4096),
                default=32,
                show_default=True,
                help="Requests in flight at the most at each server of the highest weight; fewer while it refuses them.",
            ),
            option(
                "--timeout",
                type=Number(0.1),
                default=120.0,
                show_default=True,
                metavar="SECONDS",
                help="Wait for one answer.",
            ),
            option(
                "--deadline",
                type=Number(0.1),
                default=600.0,
                show_default=True,
                metavar="SECONDS",
                help="Time of trying after which a document fails; outages do not count.",
            ),
            option(
                "--max-outage",
                type=Number(1),
                default=7200.0,
                show_default=True,
                metavar="SECONDS",
                help="Time without any server after which the run stops.",
            ),
            option("--rpm", type=Number(0), default=0.0, metavar="N", help="Requests per minute at each server."),
            option("--tpm", type=Number(0), default=0.0, metavar="N", help="Tokens per minute at each server."),
            option(
                "--prices",
                type=FILE,
                help='TOML with [models."NAME"] prompt and answer, in dollars per million tokens.',
            ),
            option("--max-cost", type=Number(0), metavar="DOLLARS", help="Stop before the bill passes this."),
            option(
                "--max-requests",
                type=click.IntRange(0),
                metavar="N",
                help="Stop after this many requests, repeated ones included.",
            ),
            option(
                "--cache",
                type=FILE,
                default=None,
                help="Answers already paid for, shared by all runs of this host.  "
                "[default: ~/.cache/hydra-judge/answers.sqlite]",
            ),
        ]
    )


def judge_options() -> Decorator:
    """Options that decide how a document is judged."""
    option = click.option
    return _apply(
        [
            option(
                "--rubric",
                required=True,
                metavar="R",
                help=f"What to look for: a TOML file, or one of {', '.join(shipped_rubrics())}.",
            ),
            option(
                "--answer",
                type=click.Choice(["auto", *FORMS]),
                default="auto",
                show_default=True,
                help="Form of the answer; auto asks the server what it understands. p_yes reads the probability of Yes.",
            ),
            option(
                "--votes",
                type=click.IntRange(1, 32),
                default=1,
                show_default=True,
                help="Independent answers for each text.",
            ),
            option(
                "--temperature",
                type=Number(0, 2),
                default=None,
                help="Of sampling.  [default: 0, or 0.7 with several votes]",
            ),
            option(
                "--request-option",
                "request_options",
                multiple=True,
                metavar="KEY=JSON",
                help="Further key of the request body; null removes one.",
            ),
        ]
    )


def reading_options() -> Decorator:
    """Options that decide what of the input is a document."""
    option = click.option
    return _apply(
        [
            option("--text-key", default="text", show_default=True, help="Key or column of the text."),
            option("--id-key", default="id", show_default=True, help="Key or column of the id."),
            option(
                "--max-document-bytes",
                type=click.IntRange(1),
                default=MAX_DOCUMENT_BYTES,
                show_default=True,
                help="Larger documents are quarantined.",
            ),
            option(
                "--block-bytes",
                type=click.IntRange(1),
                default=256 << 20,
                show_default=True,
                help="Size from which a file is split into blocks.",
            ),
            option(
                "--limit", type=click.IntRange(1), default=None, metavar="N", help="Take the first N documents only."
            ),
        ]
    )


def take_servers(options: dict[str, Any]) -> Servers:
    """The options of `server_options`, taken out of `options`."""
    return Servers(
        urls=options.pop("urls"),
        model=options.pop("model"),
        api_key_env=options.pop("api_key_env"),
        concurrency=options.pop("concurrency"),
        timeout=options.pop("timeout"),
        deadline=options.pop("deadline"),
        max_outage=options.pop("max_outage"),
        requests_per_minute=options.pop("rpm"),
        tokens_per_minute=options.pop("tpm"),
        prices=options.pop("prices"),
        max_cost=options.pop("max_cost"),
        max_requests=options.pop("max_requests"),
        cache=options.pop("cache") or default_cache_path(),
    )


def request_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """KEY=JSON pairs; a value that is no JSON is taken as a string."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or key in ("model", "messages"):
            raise ConfigError(f"--request-option {pair}: expected KEY=VALUE, a key other than model and messages")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
        try:
            json.dumps(values[key], allow_nan=False)
        except ValueError:
            raise ConfigError(f"--request-option {pair}: not a finite number, which JSON does not know") from None
    return values


def sharing_options(what: str) -> Decorator:
    """Options of verbs whose work several processes can share, by `what`."""
    option = click.option
    return _apply(
        [
            option(
                "--worker",
                default="0/1",
                metavar="I/N|slurm",
                help=f"Be worker I of N (from 0), each with the {what} I, I+N, ...; the last to end completes the output. "
                "slurm: by the place of this task in its job array.",
            ),
            option(
                "--ray",
                metavar="ADDRESS",
                help=f"Share the {what} out over a Ray cluster: auto for the one this host belongs to, HOST:PORT, or local "
                "for processes of this host alone. All hosts must see input and output by the same paths.",
            ),
            option(
                "--ray-workers",
                type=click.IntRange(1),
                default=None,
                metavar="N",
                help="Processes on the cluster at the most.  [default: one a CPU]",
            ),
        ]
    )


def take_sharing(options: dict[str, Any]) -> tuple[tuple[int, int], Cluster | None]:
    """The options of `sharing_options`, taken out of `options`: (number, count) of the worker, and the cluster."""
    worker, address, workers = (options.pop(name) for name in ("worker", "ray", "ray_workers"))
    number, count = parse_worker(worker)
    if address is None:
        if workers is not None:
            raise ConfigError("--ray-workers: belongs to --ray, which is missing")
        return (number, count), None
    if count > 1:
        raise ConfigError("--ray, --worker: are two ways to share the work out; choose one")
    return (number, count), Cluster(address=address, workers=workers)


def parse_worker(text: str) -> tuple[int, int]:
    """ "I/N" as (I, N) with 0 <= I < N; "slurm" by the variables that Slurm sets for a task of an array."""
    if text == "slurm":
        return _slurm_worker()
    number, slash, count = text.partition("/")
    if not slash or not number.isdecimal() or not count.isdecimal() or not int(number) < int(count):
        raise ConfigError(f"--worker {text}: expected I/N with I from 0 to N - 1, or slurm")
    return int(number), int(count)


def _slurm_worker() -> tuple[int, int]:
    """Place in the array. An array need not begin at 0 nor count by one."""
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "STEP", "COUNT")]
    values = [os.environ.get(name, "") for name in names]
    for name, value in zip(names, values, strict=True):
        if not value.isdecimal():
            raise ConfigError(f"--worker slurm: {name} is {value!r}; run it in a job array (sbatch --array=0-7)")
    task, first, step, count = (int(value) for value in values)
    place, rest = divmod(task - first, max(step, 1))
    if rest or not 0 <= place < count:
        raise ConfigError(
            f"--worker slurm: task {task} of {count} from {first} in steps of {step} has no place in an even array; "
            "give --worker I/N"
        )
    return place, count
