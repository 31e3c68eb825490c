# SPDX-License-Identifier: Apache-2.0
"""`nmoe-generate`: continue a prompt with a run's newest checkpoint, token by token on the terminal.

For looking at a model. To serve one, export it (`nmoe-convert to-hf`) and use an inference engine such as vLLM.
"""

import argparse
import codecs
import dataclasses
import importlib.util
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nmoe
from nmoe import arch
from nmoe.checkpoint.store import find_checkpoint, verify
from nmoe.config import Config, config_from_tables
from nmoe.errors import CheckpointError, ConfigError, DataError, EnvironmentFault
from nmoe.formats.shards import open_shards
from nmoe.formats.tokenizers import Tokenizer, load_tokenizer
from nmoe.status import exit_status
from nmoe.words import MOST_INT

if TYPE_CHECKING:
    from nmoe.model.transformer import Transformer

__all__ = ["generate_parser", "load_run", "main", "tokenizer_of"]


def tokenizer_of(run: Path, config: Config, spec: str | None) -> Tokenizer:
    """The tokenizer that a run was trained with.

    Args:
        run: Its folder.
        config: Its config.
        spec: What the user named, or None to find it.

    Raises:
        DataError: It is not found, or another one than the shards were made with.
    """
    folder = config.data.train[0].path if config.data.train else ""
    shards = open_shards(folder) if folder and Path(folder, "manifest.json").is_file() else None
    if spec is None:
        if (run / "hf" / "tokenizer.json").is_file():
            spec = str(run / "hf")
        elif config.data.builtin or (shards is not None and shards.tokenizer_name == "bytes"):
            spec = "bytes"
        else:
            named = f" ({shards.tokenizer_name})" if shards else ""
            raise DataError(f"{run}: name the tokenizer of its data{named} with --tokenizer")
    tokenizer = load_tokenizer(spec)
    if shards is not None and shards.tokenizer_sha256 != tokenizer.sha256:
        raise DataError(f"--tokenizer {spec}: not the one that {folder} was made with ({shards.tokenizer_name})")
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"--tokenizer {spec}: ids up to {tokenizer.vocab_size - 1}, the model knows {config.model.vocab_size}"
        )
    return tokenizer


def load_run(path: Path, *, dtype: str | None = None) -> "Transformer":
    """The model of a run's newest checkpoint, on the GPU where there is one.

    Args:
        path: Folder of a run, or of a checkpoint.
        dtype: ``fp32`` or ``bf16`` for the computation; by default that of the run.

    Raises:
        CheckpointError: There is no complete checkpoint, or it is damaged or of another model.
    """
    import torch

    from nmoe.checkpoint.load import load_some, stored_tensors
    from nmoe.comm.local import Local
    from nmoe.model.transformer import Transformer

    info = find_checkpoint(path)
    config = config_from_tables(dict(info.config), where=str(info.path), name="sample")
    if dtype is not None:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, dtype=dtype))  # type: ignore[arg-type]
    arch.decide(config.train.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device):
        model = Transformer(config, comm=Local(device))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for problem in verify(info):
        raise CheckpointError(problem)
    for name in sorted(tensors.keys() - stored_tensors(info.path).keys()):
        raise CheckpointError(f"{info.path}: lacks {name}; it was written by another version of the model")
    load_some(info, tensors)
    return model


def _text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Text as it becomes certain: a character whose bytes are spread over tokens appears with its last one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(tokenizer.token_bytes(token))
    yield decoder.decode(b"", final=True)


def generate_parser() -> argparse.ArgumentParser:
    """Arguments of `nmoe-generate`."""
    parser = argparse.ArgumentParser(
        prog="nmoe-generate", description="Continue a prompt with the newest checkpoint of a run."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run, or of one of its checkpoints")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="text to continue (default: a new document)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=200, help="most new tokens (default: 200)")
    parser.add_argument(
        "--temperature", metavar="X", type=float, default=0.0, help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument(
        "--top-p", metavar="P", type=float, default=1.0, help="draw from the likeliest tokens of this sum (default: 1)"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--tokenizer", metavar="T", help="'bytes', a tokenizer.json or a folder with one")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="of the computation (default: the run's)")
    parser.add_argument("--version", action="version", version=f"nmoe-core {nmoe.__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `nmoe-generate`."""
    options = generate_parser().parse_args(arguments)
    return exit_status(_generate, options)


def _generate(options: argparse.Namespace) -> int:
    for name, good, expected in (
        ("max_tokens", 0 <= options.max_tokens <= MOST_INT, f"0 to {MOST_INT}"),
        ("temperature", 0 <= options.temperature < math.inf, "0 or more, and finite"),
        ("top_p", 0 < options.top_p <= 1, "more than 0, at most 1"),
        ("seed", 0 <= options.seed <= MOST_INT, f"0 to {MOST_INT}"),
    ):
        if not good:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected {expected}")
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault("nmoe-generate needs PyTorch: install nmoe-core[train]")
    from nmoe.model.generate import stream

    model = load_run(options.run, dtype=options.dtype)
    tokenizer = tokenizer_of(find_checkpoint(options.run).run, model.config, options.tokenizer)
    (prompt,) = tokenizer.encode_batch([options.prompt])
    tokens = stream(
        model,
        [tokenizer.eos_id, *prompt.tolist()],  # a document begins after the end of another
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        eos_id=tokenizer.eos_id,
    )
    sys.stdout.write(options.prompt)
    for text in _text(tokenizer, tokens):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
