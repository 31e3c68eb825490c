# SPDX-License-Identifier: Apache-2.0
"""The command line: data on standard output, progress and errors on standard error, exit 0, 1 (the work failed) or 2."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from hydra_judge import __version__
from hydra_judge.budget import BudgetError
from hydra_judge.calibrate import calibrate, read_pairs, write_calibration
from hydra_judge.corpus import plan
from hydra_judge.engine import StoppedError
from hydra_judge.explain import explain
from hydra_judge.local import serve_local
from hydra_judge.options import (
    FILE,
    FOLDER,
    Number,
    judge_options,
    reading_options,
    request_options,
    server_options,
    sharing_options,
    take_servers,
    take_sharing,
)
from hydra_judge.pack import Packing, pack_on_cluster, pack_share
from hydra_judge.pack import pack as pack_scored
from hydra_judge.report import read_totals, write_report
from hydra_judge.rubric import load_rubric
from hydra_judge.run import Job, run_score
from hydra_judge.score import Reading
from hydra_judge.session import StudentGate, default_judge, run_estimate
from hydra_judge.student import fit
from nmoe.errors import ConfigError, line_of
from nmoe.formats.shards import open_shards, verify_shards

__all__ = ["group", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hydra-judge")
def group() -> None:
    """Grade a corpus with a large language model and turn the good part into token shards.

    \b
    hydra-judge score corpus/ --rubric educational --base-url http://localhost:8000/v1 --model NAME --output scored
    hydra-judge pack scored --tokenizer tokenizer.json --min-score 3 --output shards
    hydra-judge verify shards
    """


@group.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--output", required=True, type=FOLDER, metavar="DIR", help="Folder for scores, quarantine and accounts.")
@judge_options()
@server_options()
@reading_options()
@click.option(
    "--student",
    type=FILE,
    default=None,
    help="Student of `fit`: it decides where it is sure, the model is asked for the rest.",
)
@click.option(
    "--min-score",
    type=Number(),
    default=None,
    metavar="S",
    help="With --student: the score that decides between keep and drop.",
)
@click.option(
    "--confidence",
    type=Number(0.5, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="With --student: how sure it must be.",
)
@click.option(
    "--canaries",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Judge N documents of low score again under each known injection; `report` shows the shift.",
)
@sharing_options("blocks")
@click.option("--dry-run", is_flag=True, help="Say what it would cost; ask nothing but a pilot, and write no scores.")
@click.option("--pilot", type=click.IntRange(0), default=0, metavar="N", help="Measure the estimate on N documents.")
@click.option("--batch", is_flag=True, help="Use the Batch API: cheaper, answers within a day.")
@click.option(
    "--batch-poll",
    type=Number(0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks at a batch.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
def score(**options: Any) -> None:
    """Grade every document of INPUT...

    INPUT is a file (.jsonl, .txt, .md, each plain, .gz or .zst; .parquet, .arrow), a folder, a glob, hf://OWNER/NAME
    or - for jsonl on standard input. What is no document goes to DIR/quarantine.jsonl with path, line and reason.

    The same command goes on where an earlier one was stopped or killed; an answer that was paid for is never asked
    for again, in this run or any other with the same cache.
    """
    worker, cluster = take_sharing(options)
    servers = take_servers(options).share(*worker)
    judge = default_judge(
        load_rubric(options["rubric"]),
        model=servers.model,
        votes=options["votes"],
        temperature=options["temperature"],
        options=request_options(options["request_options"]),
    )
    if (options["student"] is None) != (options["min_score"] is None):
        raise ConfigError(
            "--student and --min-score belong together: the student decides which side of the score a text is on"
        )
    if options["student"] and options["batch"]:
        raise ConfigError("--student does not go with --batch: score with the student first, the rest is small")
    gate = (
        StudentGate(
            options["student"], rubric=judge.rubric, min_score=options["min_score"], confidence=options["confidence"]
        )
        if options["student"]
        else None
    )
    reading = Reading(
        text_key=options["text_key"],
        id_key=options["id_key"],
        max_bytes=options["max_document_bytes"],
        limit=options["limit"],
    )
    whole = options["limit"] or any(one == "-" or one.startswith("hf://") for one in options["inputs"])
    if whole and (worker[1] > 1 or cluster):
        raise ConfigError(
            "--worker, --ray: go with files alone; --limit, hf:// and standard input have no blocks to share"
        )
    if cluster and (options["batch"] or servers.max_cost is not None or servers.max_requests is not None):
        raise ConfigError("--ray: goes with neither --batch nor --max-cost and --max-requests, which one process keeps")
    blocks = plan(options["inputs"], block_bytes=options["block_bytes"])
    if options["dry_run"]:
        told = asyncio.run(
            run_estimate(
                blocks,
                judge=judge,
                form=options["answer"],
                servers=servers,
                reading=reading,
                pilot=options["pilot"],
                batch=options["batch"],
            )
        )
        click.echo("\n".join(told))
        return
    summary = run_score(
        Job(blocks=blocks, judge=judge, servers=servers, reading=reading, output=options["output"], student=gate),
        form=options["answer"],
        quiet=options["quiet"],
        canaries=options["canaries"],
        worker=worker,
        cluster=cluster,
        batch_poll_s=options["batch_poll"] if options["batch"] else None,
    )
    click.echo(summary)


@group.command()
@click.argument("scored", type=FOLDER, metavar="DIR")
@click.option("--tokenizer", required=True, metavar="T", help='"bytes", a tokenizer.json, or a folder that holds one.')
@click.option(
    "--min-score", type=Number(), required=True, metavar="S", help="Lowest score that is kept, on the rubric's scale."
)
@click.option("--output", required=True, type=FOLDER, metavar="SHARDS", help="Folder for the shards.")
@click.option(
    "--shard-tokens", type=click.IntRange(2), default=100_000_000, show_default=True, help="Tokens of a shard."
)
@click.option(
    "--max-document-tokens", type=click.IntRange(1), default=None, help="Split longer documents.  [default: a shard]"
)
@sharing_options("parts")
@click.option("--quiet", is_flag=True, help="No progress.")
def pack(
    scored: Path,
    tokenizer: str,
    min_score: float,
    output: Path,
    shard_tokens: int,
    max_document_tokens: int | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Write the documents of DIR that score at least S as token shards.

    Shared out, each process tokenizes some of the files in DIR and one cuts the shards; they are the same.
    """
    worker, cluster = take_sharing(options)
    packing = Packing(
        scored=scored,
        tokenizer=tokenizer,
        min_score=min_score,
        output=output,
        shard_tokens=shard_tokens,
        max_document_tokens=max_document_tokens,
    )
    if cluster:
        totals = pack_on_cluster(packing, cluster, quiet=quiet)
    elif worker[1] > 1:
        totals = pack_share(packing, worker, quiet=quiet)
    else:
        totals = pack_scored(packing)
    if isinstance(totals, str):
        click.echo(totals)
        return
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(totals.dropped.items())) or "none"
    click.echo(f"{output}: {totals.kept} documents, {totals.tokens} tokens; dropped: {dropped}")


@group.command("fit")
@click.argument("scored", type=FOLDER, metavar="DIR")
@click.option("--output", type=FILE, required=True, metavar="STUDENT", help="File for the student.")
def fit_command(scored: Path, output: Path) -> None:
    """Teach a cheap student the judge's scores in DIR, and say how well it does on documents it has not seen."""
    student = fit(scored)
    student.save(output)
    about = student.about
    click.echo(f"learned from {about['trained_on']} documents; on {about['held_out']} others:")
    click.echo(f"Spearman {about['spearman']:.3f}, mean absolute error {about['mae']:.3f}")
    for line in about["decisions_at_0.95"]:
        right = "-" if line["right"] is None else f"{line['right']:.3f}"
        click.echo(
            f"min-score {line['min_score']}: decides {line['decides']:.3f} of the documents alone, right in {right}"
        )


@group.command("calibrate")
@click.argument("scored", type=FOLDER, metavar="DIR")
@click.option("--labels", type=FILE, required=True, help='People\'s grades: jsonl of {"id": ..., "score": number}.')
@click.option("--good", type=Number(), default=3.0, show_default=True, help="Lowest label that counts as good.")
@click.option(
    "--keep-share",
    type=Number(0, 1, min_open=True),
    multiple=True,
    help="Find the score that keeps this share; repeatable.",
)
@click.option(
    "--precision",
    type=Number(0, 1, min_open=True),
    multiple=True,
    help="Find the score from which on this share is good; repeatable.",
)
@click.option(
    "--output", type=FOLDER, default=None, help="Folder for calibration.json and calibration.html.  [default: DIR]"
)
def calibrate_command(
    scored: Path,
    labels: Path,
    good: float,
    keep_share: tuple[float, ...],
    precision: tuple[float, ...],
    output: Path | None,
) -> None:
    """Compare the scores of DIR with people's grades and find the score to cut at.

    A score is chosen on one half of the labels; what it keeps is reported on the other.
    """
    pairs = read_pairs(scored, labels)
    result = calibrate(pairs, good=good, shares=list(keep_share), precisions=list(precision))
    output = output or scored
    output.mkdir(parents=True, exist_ok=True)
    write_calibration(result, pairs, output)
    click.echo("\n".join(result.lines()))


@group.command()
@click.argument("shards", type=FOLDER, metavar="SHARDS")
def verify(shards: Path) -> None:
    """Re-read every byte of SHARDS and check it against the manifest."""
    problems = 0
    for problem in verify_shards(shards):
        click.echo(problem)
        problems += 1
    if problems:
        raise StoppedError(f"{shards}: {problems} problems; make the shards again")
    opened = open_shards(shards)
    click.echo(f"{shards}: {opened.num_documents} documents, {opened.num_tokens} tokens, no problem")


@group.command("explain")
@click.argument("shards", type=FOLDER, metavar="SHARDS")
@click.option(
    "--offset",
    type=click.IntRange(0),
    required=True,
    metavar="N",
    help="Token number, counted over all shards in order.",
)
@click.option("--tokenizer", default=None, metavar="T", help="What made the shards, if it was not bytes.")
def explain_command(shards: Path, offset: int, tokenizer: str | None) -> None:
    """Show the document that holds token N of SHARDS: source, score, and why the judge gave it."""
    found = explain(shards, offset=offset, tokenizer=tokenizer)
    text = found.pop("text")
    for key, value in found.items():
        click.echo(f"{key}: {value}")
    click.echo(f"\n{text}")


@group.command("report")
@click.argument("scored", type=FOLDER, metavar="DIR")
@click.option("--output", type=FOLDER, default=None, help="Folder for report.md and report.html.  [default: DIR]")
def report_command(scored: Path, output: Path | None) -> None:
    """Tell what the judge did in DIR: scores, keep rates by source, cost, drop reasons, injection, agreement."""
    for path in write_report(read_totals(scored), output or scored):
        click.echo(path)


@group.command("serve-local")
@click.option(
    "--gguf",
    type=FILE,
    default=None,
    help="Model of llama.cpp.  [default: SmolLM2-135M-Instruct, from the extra local]",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="On 127.0.0.1; 0 for any free one."
)
@click.option(
    "--context", type=click.IntRange(256), default=2048, show_default=True, help="Tokens of prompt and answer."
)
@click.option("--threads", type=click.IntRange(1), default=None, metavar="N", help="[default: one a CPU]")
def serve_local_command(gguf: Path | None, port: int, context: int, threads: int | None) -> None:
    """Serve a small model on this machine, for a judge without a network; prints its base URL.

    \b
    hydra-judge serve-local &
    hydra-judge score corpus/ --rubric small --answer p_yes --base-url http://127.0.0.1:8000/v1 --model local \\
        --concurrency 2 --output scored
    """
    serve_local(gguf, port=port, context=context, threads=threads)


def main() -> None:
    """Entry point of `hydra-judge`."""
    try:
        group.main(standalone_mode=False)
    except (StoppedError, BudgetError) as stopped:
        _fail(str(stopped), 1)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt, asyncio.CancelledError):
        _fail("interrupted; every answer is kept, the same command goes on from here", 1)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        _fail(line, 2)


def _fail(message: str, code: int) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(code)
