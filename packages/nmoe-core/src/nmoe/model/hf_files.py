# SPDX-License-Identifier: Apache-2.0
"""Tensors of a Hugging Face folder, read and written one at a time.

Files are memory-mapped, so that the largest thing in memory is one tensor of one layer. Keys are accounted for before
the first value is read: what is missing, unknown or of another shape is one error that lists it.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nmoe.config import Config
from nmoe.errors import DataError
from nmoe.model.hf import Entry, copies, entries
from nmoe.model.params import parameter_shapes
from nmoe.model.transformer import Transformer
from nmoe.rdep.experts import Experts

__all__ = ["HFFolder", "load_model", "state_shapes", "write_folder"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SCALE = "_scale_inv"  # key of an FP8 weight + this: its scales, one per 128 x 128 block (DeepSeek-V3's checkpoints)
_LISTED = 8


class HFFolder:
    """A folder with config.json and safetensors, open for reading; a context manager.

    Args:
        path: The folder.

    Raises:
        DataError: A file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = self._json("config.json")
        self._stack = ExitStack()
        names = self._indexed() if (path / INDEX).is_file() else {SINGLE}
        self._files: dict[str, Any] = {}
        for name in sorted(names):
            try:
                file = self._stack.enter_context(safe_open(path / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise DataError(f"{path / name}: not a readable safetensors file ({error})") from None
            self._files |= dict.fromkeys(file.keys(), file)
        behind = f"model.layers.{self.config.get('num_hidden_layers')}."
        if not any(key.startswith(behind) for key in self._files):
            # transformers writes the number of these layers, which it does not train, and leaves the layers out.
            self.config |= {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}

    def __enter__(self) -> "HFFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _indexed(self) -> set[str]:
        """Names of the files that the index lists."""
        listed = self._json(INDEX).get("weight_map")
        if not isinstance(listed, dict) or any(not isinstance(n, str) or Path(n).name != n for n in listed.values()):
            raise DataError(
                f"{self.path / INDEX}: weight_map is no table of tensors and the files in this folder that hold them"
            )
        return set(listed.values())

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.path / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise DataError(f"{self.path / name}: not found; expected the folder of a Hugging Face model") from None
        except (ValueError, TypeError) as error:
            raise DataError(f"{self.path / name}: not a JSON object ({error})") from None

    def check(self, config: Config) -> None:
        """Account for every key of the folder.

        Raises:
            DataError: Keys are missing, unknown or of another shape; the message lists them.
        """
        wanted = dict(_key_shapes(config))
        repeated = {copy: key for copy, key in copies(config).items() if copy in self._files}
        wanted |= {copy: wanted[key] for copy, key in repeated.items()}
        found = {key for key in self._files if not self._is_scale(key)}
        problems = [f"missing: {_list(wanted.keys() - found)}"] if wanted.keys() - found else []
        if found - wanted.keys():
            problems.append(f"unknown: {_list(found - wanted.keys())}")
        shapes = {key: tuple(self._files[key].get_slice(key).get_shape()) for key in found & wanted.keys()}
        odd = [f"{key} {shape}, expected {wanted[key]}" for key, shape in shapes.items() if shape != wanted[key]]
        if odd:
            problems.append(f"reshaped: {_list(odd)}")
        if problems:
            raise DataError(f"{self.path}: tensors do not fit config.json: {'; '.join(problems)}")
        for copy, key in repeated.items():
            if not torch.equal(self._tensor(copy), self._tensor(key)):
                raise DataError(f"{self.path}: {copy} differs from {key}, and here the two are one")

    def _is_scale(self, key: str) -> bool:
        return key.endswith(_SCALE) and key.removesuffix(_SCALE) in self._files

    def _tensor(self, key: str) -> Tensor:
        value = self._files[key].get_tensor(key)
        if key + _SCALE not in self._files:
            return value
        scale = self._files[key + _SCALE].get_tensor(key + _SCALE)
        full = scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        return value.float() * full[: value.shape[0], : value.shape[1]]

    def read(self, entry: Entry) -> Tensor:
        """The value of an entry, in the layout of our model and the dtype of the file (fp32 where it was FP8)."""
        parts = [self._tensor(key) for key in entry.theirs]
        return parts[0] if len(parts) == 1 else torch.stack(parts, dim=1).flatten(0, 1)


def _list(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def state_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a model's state: parameters and selection biases."""
    shapes = parameter_shapes(config)
    if config.moe.selection_bias:
        routers = [name for name in shapes if name.endswith("moe.router.weight")]
        shapes |= {name.removesuffix("weight") + "bias": (config.moe.num_experts,) for name in routers}
    return shapes


def _key_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    shapes = state_shapes(config)
    for entry in entries(config):
        shape = shapes[entry.ours] if entry.expert is None else shapes[entry.ours][1:]
        for key in entry.theirs:
            yield key, (shape[0] // len(entry.theirs), *shape[1:])


@torch.no_grad()
def load_model(model: Transformer, folder: HFFolder) -> None:
    """Fill a model, or the share of its experts that this rank owns, from a folder whose keys were checked."""
    state = model.state_dict()
    owned = next((m.owned for m in model.modules() if isinstance(m, Experts)), range(0))
    for entry in entries(model.config):
        if entry.expert is None:
            state[entry.ours].copy_(folder.read(entry))
        elif entry.expert in owned:
            state[entry.ours][entry.expert - owned.start].copy_(folder.read(entry))


def _exported(entry: Entry, value: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    if entry.expert is not None:
        value = value[entry.expert]
    if entry.ours.endswith("router.bias"):
        dtype = torch.float32  # a score that is moved in steps of 1e-3; the published checkpoints keep it so too
    if len(entry.theirs) == 1:
        yield entry.theirs[0], value.to(dtype, copy=True).contiguous()
        return
    for key, part in zip(entry.theirs, value.unflatten(0, (-1, 2)).unbind(1), strict=True):
        yield key, part.to(dtype, copy=True).contiguous()


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # of which only the text says what the file system said
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error from None


def write_folder(
    path: Path, *, config: Config, state: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int = 5 << 30
) -> None:
    """Write all tensors of a model as safetensors with an index.

    Args:
        path: An existing folder.
        config: Of the model.
        state: Name -> tensor with all experts; read one at a time, so it may load what it is asked for.
        dtype: Of the tensors written; the selection bias is always fp32.
        shard_bytes: A file is closed before it would grow past this.
    """
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    written: list[Path] = []
    held, total = ("", torch.empty(0)), 0

    def flush() -> None:
        if shard:
            written.append(path / f"part-{len(written)}.safetensors")
            _save(shard, written[-1])
            weight_map.update(dict.fromkeys(shard, written[-1].name))
            shard.clear()

    repeated: dict[str, list[str]] = {}
    for copy, key in copies(config).items():
        if copy != "lm_head.weight":  # a tied head is said in config.json, nobody misses its copy
            repeated.setdefault(key, []).append(copy)
    for entry in entries(config):
        if held[0] != entry.ours:  # experts of one layer follow each other, and their tensor is fetched once a run
            held = (entry.ours, state[entry.ours])
        pairs = [*_exported(entry, held[1], dtype)]
        pairs += [(copy, pairs[0][1].clone()) for copy in repeated.get(pairs[0][0], [])]
        for key, value in pairs:
            size = value.numel() * value.element_size()
            if shard and sum(t.numel() * t.element_size() for t in shard.values()) + size > shard_bytes:
                flush()
            shard[key], total = value, total + size
    flush()
    names = {part.name: f"model-{i + 1:05d}-of-{len(written):05d}.safetensors" for i, part in enumerate(written)}
    for part in written:
        part.rename(path / names[part.name])
    index = {"metadata": {"total_size": total}, "weight_map": {key: names[part] for key, part in weight_map.items()}}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
