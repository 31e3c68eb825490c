# SPDX-License-Identifier: Apache-2.0
"""`nmoe-convert`: Hugging Face folders to checkpoints and back, one tensor in memory at a time.

    nmoe-convert from-hf HF_DIR RUN       RUN/checkpoints/step-00000000, RUN/config.toml, RUN/hf (tokenizer files)
    nmoe-convert to-hf RUN HF_DIR         config.json, generation_config.json, safetensors with index, tokenizer files

Weights become fp32 on the way in, as training keeps them, and bf16 on the way out; bf16 in and out is bit-identical.
"""

import argparse
import dataclasses
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nmoe
from nmoe.checkpoint.store import CheckpointInfo, commit, find_checkpoint, verify
from nmoe.config import Config, config_from_tables
from nmoe.config.text import format_value
from nmoe.errors import CheckpointError, DataError, EnvironmentFault
from nmoe.formats.files import new_folder
from nmoe.formats.tokenizers import load_tokenizer
from nmoe.status import exit_status

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["convert_parser", "export_run", "import_folder", "main"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
)
_KEPT = (*_TOKENIZER_FILES, "generation_config.json")


def import_folder(source: Path, run: Path) -> tuple[Config, int]:
    """Make a run's folder with a checkpoint at step 0 from a Hugging Face model.

    Args:
        source: Folder with config.json and safetensors.
        run: Folder to make.

    Returns:
        The config, and the number of tensors of the checkpoint.

    Raises:
        DataError: The folder is not a model that can be read here, or ``run`` exists.
    """
    from nmoe.checkpoint.save import write_tensors
    from nmoe.model.hf import config_from_hf
    from nmoe.model.hf_files import HFFolder

    with HFFolder(source) as folder:
        config, text = config_from_hf(folder.config, where=str(source / "config.json"))
        folder.check(config)
        building = run / "checkpoints" / ".step-00000000.tmp"
        with new_folder(run):
            building.mkdir(parents=True)
            with tempfile.TemporaryDirectory(dir=building.parent, prefix=".staging-") as staging:
                tensors = _staged(folder, config, Path(staging))
                write_tensors(building, tensors)
            tables = {section: dict(table) for section, table in _tables(config).items()}
            target = run / "checkpoints" / "step-00000000"
            commit(building, target, step=0, state={"step": 0, "weights_only": True}, config=tables)
            start = f"[run]\nname = {format_value(run.name)}\nstart_from = {format_value(str(run))}\n\n"
            (run / "config.toml").write_text(start + text, encoding="utf-8")
            _copy(source, run / "hf", _KEPT)
    return config, len(tensors)


def _staged(folder, config: Config, staging: Path) -> "dict[str, Tensor]":
    """Every tensor of the model in files of its own, so that the whole never has to be in memory."""
    import torch

    from nmoe.checkpoint.save import tensor_in_file
    from nmoe.model.hf import entries
    from nmoe.model.hf_files import state_shapes

    tensors = {}
    for number, (name, shape) in enumerate(state_shapes(config).items()):
        tensors[name] = tensor_in_file(staging / str(number), shape=shape, dtype=torch.float32)
    for entry in entries(config):
        target = tensors[entry.ours] if entry.expert is None else tensors[entry.ours][entry.expert]
        target.copy_(folder.read(entry))
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _tables(config: Config) -> Mapping[str, Mapping[str, object]]:
    return dataclasses.asdict(config)


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        if (source / name).is_file():
            target.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


class _Stored(Mapping[str, "Tensor"]):
    """Tensors of a checkpoint, each read when it is asked for."""

    def __init__(self, info: CheckpointInfo) -> None:
        from nmoe.checkpoint.load import stored_tensors

        self._info = info
        self._stored = {
            name.removeprefix("model."): entry
            for name, entry in stored_tensors(info.path).items()
            if name.startswith("model.")
        }

    def __getitem__(self, name: str) -> "Tensor":
        import torch

        from nmoe.checkpoint.load import load_some

        shape, dtype = self._stored[name]
        tensor = torch.empty(shape, dtype=dtype)
        load_some(self._info, {f"model.{name}": tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def export_run(source: Path, target: Path, *, dtype: "torch.dtype", tokenizer: Path | None = None) -> Config:
    """Write a run's newest checkpoint as a Hugging Face folder that loads without remote code.

    Args:
        source: Folder of a run, or of a checkpoint.
        target: Folder to make.
        dtype: Of the weights written.
        tokenizer: Folder or tokenizer.json whose files are copied; by default what the run was imported with.

    Returns:
        The config of the model.

    Raises:
        CheckpointError: No complete checkpoint, or it is damaged or of another model.
        DataError: No Hugging Face family computes this model, or ``target`` exists.
    """
    from nmoe.model.hf import config_to_hf
    from nmoe.model.hf_files import state_shapes, write_folder

    info = find_checkpoint(source)
    files = _tokenizer_files(info.run / "hf" if tokenizer is None else tokenizer)
    if tokenizer is not None and not files:
        raise DataError(f"--tokenizer {tokenizer}: no tokenizer.json, nor a folder with tokenizer files")
    config = config_from_tables(dict(info.config), where=str(info.path), name="exported")
    hf = config_to_hf(config)
    for problem in verify(info):
        raise CheckpointError(problem)
    state, expected = _Stored(info), state_shapes(config).keys()
    for name in sorted(state.keys() ^ expected):
        where = "lacks" if name in expected else "has unknown"
        raise CheckpointError(f"{info.path}: {where} {name}; it was written by another version of the model")
    eos = load_tokenizer(str(files["tokenizer.json"])).eos_id if "tokenizer.json" in files else None
    hf |= {"torch_dtype": str(dtype).removeprefix("torch."), "eos_token_id": eos}
    with new_folder(target):
        write_folder(target, config=config, state=state, dtype=dtype)
        for name, file in files.items():
            shutil.copyfile(file, target / name)
        _write_json(target / "config.json", hf)
        if "generation_config.json" not in files:
            _write_json(target / "generation_config.json", {"_from_model_config": True, "eos_token_id": eos})
    return config


def _tokenizer_files(place: Path) -> dict[str, Path]:
    """Files to copy beside a model, by name: those of a folder, or a tokenizer.json of any name."""
    if place.is_file():
        return {"tokenizer.json": place}
    return {name: place / name for name in _KEPT if (place / name).is_file()}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def convert_parser() -> argparse.ArgumentParser:
    """Arguments of `nmoe-convert`."""
    parser = argparse.ArgumentParser(
        prog="nmoe-convert", description="Convert between Hugging Face folders and nmoe checkpoints."
    )
    parser.add_argument("--version", action="version", version=f"nmoe-core {nmoe.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    reading = verbs.add_parser("from-hf", help="make a run's folder with a checkpoint at step 0 from a model")
    reading.add_argument("source", metavar="HF_DIR", type=Path, help="folder with config.json and safetensors")
    reading.add_argument("target", metavar="RUN", type=Path, help="folder to make")
    writing = verbs.add_parser("to-hf", help="write a run's newest checkpoint as a Hugging Face folder")
    writing.add_argument("source", metavar="RUN", type=Path, help="folder of a run, or of one of its checkpoints")
    writing.add_argument("target", metavar="HF_DIR", type=Path, help="folder to make")
    writing.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="of the weights (default: bf16)")
    writing.add_argument(
        "--tokenizer",
        metavar="PATH",
        type=Path,
        help="tokenizer.json, or a folder whose tokenizer files are copied (default: those the run was imported with)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `nmoe-convert`."""
    options = convert_parser().parse_args(arguments)
    return exit_status(_convert, options, place=options.target)


def _convert(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault("nmoe-convert needs PyTorch: install nmoe-core[train]")
    work: Callable[[argparse.Namespace], str] = _from_hf if options.verb == "from-hf" else _to_hf
    sys.stdout.write(work(options) + "\n")
    return 0


def _from_hf(options: argparse.Namespace) -> str:
    config, tensors = import_folder(options.source, options.target)
    made = f"{options.target}: {tensors} tensors, {config.model.num_layers} layers"
    return f"{made}; to train on, set [data] and [train] in its config.toml"


def _to_hf(options: argparse.Namespace) -> str:
    import torch

    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    export_run(options.source, options.target, dtype=dtype, tokenizer=options.tokenizer)
    tokens = any((options.target / name).is_file() for name in _TOKENIZER_FILES)
    lacking = "no tokenizer files, the run has none (bytes need none); --tokenizer adds one"
    return f"{options.target}: written" + ("" if tokens else f"; {lacking}")
