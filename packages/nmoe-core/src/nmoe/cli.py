# SPDX-License-Identifier: Apache-2.0
"""`nmoe-train` and `nmoe-prep`: arguments in, exit status out.

`nmoe.status` says what each status means. PyTorch is imported only when a run begins, so that help, checks of a config
and `--dry-run` answer at once, also where it is not installed.
"""

import argparse
import functools
import importlib.util
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nmoe
from nmoe.config import Config, load_config
from nmoe.data.builtin import make_python_docs
from nmoe.data.imports import DTYPES, find_token_files, import_tokens
from nmoe.data.prep import PrepSummary, find_inputs, prepare
from nmoe.errors import ConfigError, EnvironmentFault, line_of
from nmoe.formats.tokenizers import load_tokenizer
from nmoe.status import exit_status
from nmoe.words import MOST_INT

if TYPE_CHECKING:
    from nmoe.train.run import Outcome

__all__ = ["prep", "prep_parser", "train", "train_parser"]


def train_parser() -> argparse.ArgumentParser:
    """Arguments of `nmoe-train`."""
    parser = argparse.ArgumentParser(
        prog="nmoe-train",
        description="Train a Mixture-of-Experts language model. The same command again goes on with an unfinished run.",
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file; docs/configuration.md lists every key")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a key of the config, such as --set train.steps=100; may be repeated",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the config and print parameters, memory, GPUs, tokens and steps; train nothing",
    )
    parser.add_argument(
        "--profile",
        metavar="DIR",
        help="train a few steps from the start, write DIR/trace.json (for Chrome or Perfetto) and print where the time of a "
        "step goes; keeps no run",
    )
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=int,
        help="processes on this machine, one a GPU (default: as many as GPUs are visible; 1 on a CPU)",
    )
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=int,
        default=3,
        help="starts after a process was lost, without a new checkpoint in between, before giving up (default: 3)",
    )
    parser.add_argument("--fresh", action="store_true", help="begin a new run even where an unfinished one could go on")
    parser.add_argument("--version", action="version", version=f"nmoe-core {nmoe.__version__}")
    return parser


def prep_parser() -> argparse.ArgumentParser:
    """Arguments of `nmoe-prep`."""
    parser = argparse.ArgumentParser(
        prog="nmoe-prep",
        usage="nmoe-prep [options] --output DIR (INPUT ... | --builtin python-docs)",
        description="Make token shards from text, without a judge. Reads .txt (one document a file) and .jsonl (key "
        "'text'), plain or .gz, and folders of them; with --tokens, token files of other trainers.",
    )
    parser.add_argument("inputs", metavar="INPUT", nargs="*", help="file or folder")
    parser.add_argument(
        "--builtin",
        metavar="NAME",
        choices=["python-docs"],
        help="instead of INPUT: python-docs, English text that comes with Python, as bytes; makes DIR/train and DIR/val",
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="folder to make")
    parser.add_argument("--tokenizer", metavar="T", help="'bytes' (default), a tokenizer.json or a folder with one")
    parser.add_argument(
        "--tokens",
        metavar="WIDTH",
        choices=DTYPES,
        help="INPUT holds ids of --tokenizer, not text: .bin of nanoGPT or llm.c, .npy of OLMo or NumPy; uint16 or uint32 "
        "where the files have no header, else auto",
    )
    parser.add_argument(
        "--val-fraction",
        metavar="F",
        type=float,
        help="share of the documents held out, 0 or more and less than 1; makes DIR/train and DIR/val (default: 0, DIR alone)",
    )
    parser.add_argument("--shard-tokens", metavar="N", type=int, help="largest shard, in tokens (default: 100000000)")
    parser.add_argument("--version", action="version", version=f"nmoe-core {nmoe.__version__}")
    return parser


def train(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `nmoe-train`."""
    options = train_parser().parse_args(arguments)
    place = Path(options.profile) if options.profile else None
    return exit_status(_train, options, place=place, stopped="stopped before the run began")


def _train(options: argparse.Namespace) -> int:
    for name, least in (("nproc", 1), ("restarts", 0)):
        number = getattr(options, name)
        if number is not None and not least <= number <= MOST_INT:
            raise ConfigError(f"--{name} {number}: expected {least} or more")
    if options.profile and (options.nproc or 1) > 1:
        raise ConfigError(f"--profile looks at one process; leave out --nproc {options.nproc}")
    if options.profile == "":
        raise ConfigError("--profile: expected a folder, found an empty text")
    config = load_config(options.config, options.overrides)
    if options.dry_run:
        return _dry_run(config, nproc=options.nproc)
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault(
            "nmoe-train needs PyTorch: install nmoe-core[train] "
            "(in this repository: uv sync --locked --no-default-groups --package nmoe-core --extra train)"
        )
    place = Path(options.profile or config.run.root)
    _refuse_unwritable(place, what="--profile" if options.profile else "run.root")
    # Read when PyTorch loads its OpenMP. Threads that spin while they wait starve others where cores are shared: beside a
    # second process on two cores a quickstart step took 1 to 5 s instead of 0.45; alone it is 0.25 s either way.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if options.profile:
        return _profile(config, Path(options.profile))
    if (options.nproc or 1) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.nproc)))
    from nmoe.train.launch import launch

    try:
        end = launch(config, nproc=options.nproc, restarts=options.restarts, fresh=options.fresh)
    except OSError as error:
        if line := line_of(error, place=config.run.root):
            raise EnvironmentFault(line) from None
        raise
    for line in _summary(end.outcome, root=config.run.root) if end.outcome else ():
        print(line)
    if end.error:
        print(f"error: {end.error}", file=sys.stderr)
    return end.status


def _dry_run(config: Config, *, nproc: int | None) -> int:
    """Of the ranks that a launcher started; the first of them prints."""
    from nmoe.train.environment import slurm_environment, world_of
    from nmoe.train.plan import format_plan, make_plan

    rank, ranks, *_ = world_of(os.environ | slurm_environment(os.environ))
    plan = make_plan(config, nproc=ranks if ranks > 1 else nproc)
    if rank == 0:
        print(format_plan(plan, config=config))
    return 0


def _profile(config: Config, folder: Path) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its notes are not for whoever reads the table
    from nmoe.train.profile import format_profile, profile_steps
    from nmoe.train.report import set_up_logging

    set_up_logging()
    found = profile_steps(config, folder)
    print(format_profile(found))
    print(f"trace: {found.trace}")
    return 0


def _refuse_unwritable(root: Path, *, what: str) -> None:
    """Raises where no run folder can be made, before seconds go into loading PyTorch and data."""
    place = root
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise EnvironmentFault(f"{what} = {root}: {place} is not a folder that can be written; set {what} to one")


def _summary(outcome: "Outcome", *, root: str) -> list[str]:
    """What is printed at the end of a run."""
    lines = []
    if outcome.held_out:
        lines += [f"held-out loss  {_judged(outcome.held_out.loss_per_byte, outcome.byte_entropy)}"]
    if outcome.sample:
        lines += [
            "sample         prompt, then | and the continuation:",
            _printable(f"{outcome.sample.prompt}|{outcome.sample.text}"),
        ]
    lines += [f"run            {outcome.path} ({outcome.status} at step {outcome.step})"]
    if outcome.checkpoint:
        lines += [f"checkpoint     {outcome.checkpoint}"]
    lines += [
        "look at it     uv run streamlit run nviz" + ("" if root == "runs" else f" -- --runs {shlex.quote(root)}")
    ]
    if outcome.status == "stopped":
        lines += ["go on          the same command again"]
    return lines


def _judged(loss_per_byte: float, entropy: float | None) -> str:
    text = f"{loss_per_byte:.4f} nat/byte"
    if entropy is None:
        return text
    side = "below" if loss_per_byte <= entropy else "above"
    share = 100 * abs(1 - loss_per_byte / entropy)
    return f"{text}, {share:.0f} % {side} the byte-unigram entropy of the same text ({entropy:.2f})"


def _printable(text: str) -> str:
    """`text` without what would steer the terminal: an untrained byte model writes any byte."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def prep(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `nmoe-prep`."""
    options = prep_parser().parse_args(arguments)
    return exit_status(_prep, options, place=Path(options.output))


def _prep(options: argparse.Namespace) -> int:
    output = Path(options.output)
    if not options.output or (output.exists() and not output.is_dir()):
        raise ConfigError(f"--output {options.output!r}: expected a folder to make")
    if bool(options.inputs) == bool(options.builtin):
        raise ConfigError("nmoe-prep: expected either INPUT files or --builtin python-docs")
    if options.builtin:
        for name in ("tokenizer", "tokens", "val_fraction", "shard_tokens"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: has no effect with --builtin; leave it out")
        print(make_python_docs(output))
        return 0
    fraction = 0.0 if options.val_fraction is None else options.val_fraction
    if not 0 <= fraction < 1:
        raise ConfigError(f"--val-fraction {fraction}: expected 0 or more and less than 1")
    shard_tokens = 100_000_000 if options.shard_tokens is None else options.shard_tokens
    if not 2 <= shard_tokens <= MOST_INT:
        raise ConfigError(f"--shard-tokens {shard_tokens}: expected 2 or more, at most {MOST_INT}")
    inputs = find_token_files(options.inputs) if options.tokens else find_inputs(options.inputs)
    tokenizer = load_tokenizer(options.tokenizer or "bytes")
    make = functools.partial(import_tokens, dtype=options.tokens) if options.tokens else prepare
    with _PrepProgress() as progress:
        summary = make(
            inputs.files,
            tokenizer=tokenizer,
            output=output,
            val_fraction=fraction,
            shard_tokens=shard_tokens,
            report=progress.show,
        )
    _print_prepared(summary, output)
    if inputs.skipped:
        print(f"not read: {_listed(inputs.skipped)}", file=sys.stderr)
    return 0


def _listed(skipped: "Counter[str]") -> str:
    """What was left out of the input, the most frequent first: 3 .pdf, 1 linked folder."""
    listed = skipped.most_common(8)
    rest = skipped.total() - sum(count for _, count in listed)
    return ", ".join([f"{count:,} {what}" for what, count in listed] + ([f"{rest:,} of other kinds"] if rest else []))


class _PrepProgress:
    """How far `nmoe-prep` is, on stderr: one line that is drawn anew on a terminal, elsewhere a line every 10 s."""

    def __init__(self) -> None:
        self._began = self._shown_at = time.monotonic()
        self._drawn = False

    def show(self, documents: int, size: int) -> None:
        """Documents and bytes done so far."""
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if not terminal and now - self._shown_at < 10:
            return
        self._shown_at, self._drawn = now, terminal
        rate = size / max(1e-9, now - self._began)
        text = f"{documents:,} documents, {size / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"
        print(f"\r\x1b[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def __enter__(self) -> "_PrepProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            print(file=sys.stderr)


def _print_prepared(summary: PrepSummary, output: Path) -> None:
    for side, documents in summary.documents.items():
        print(f"{output / side}: {documents:,} documents, {summary.tokens[side]:,} tokens")
    for reason, count in sorted(summary.rejected.items()):
        print(f"{output / 'rejected.jsonl'}: {count:,} {reason}", file=sys.stderr)
