"""What makes a folder a model: its config, its tokenizer and whole safetensors files.

Invariant: no weight is read; a check costs milliseconds and needs no torch.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from headrace.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def check_folder(path: Path) -> None:
    """Raise a `ModelError` unless `path` holds a config, a tokenizer and whole safetensors files."""
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"{path}: {_why_no_config(path)}")
    if "model_type" not in read_json(config):
        raise ModelError(f"{config}: names no model_type, so this is not a transformers model")
    if not any((path / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{path}: has no {_TOKENIZER_FILES[0]}; copy the model's tokenizer files there")
    for shard in safetensors_files(path):
        header, start = _read_header(shard)
        end = start + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        size = shard.stat().st_size
        if size < end:
            raise ModelError(f"{shard}: is cut short ({size} of {end} bytes); fetch the model again")


def safetensors_files(path: Path) -> list[Path]:
    """The model's weight files.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: names no weights; fetch the model again")
        shards = [path / shard for shard in sorted(set(weight_map.values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ModelError(
                f"{path}: {len(missing)} of {len(shards)} weight files are missing, first {missing[0]}; "
                "fetch the model again"
            )
        return shards
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        raise ModelError(
            f"{path}: its weights are pickle files, which are not opened; save the model as safetensors"
        )
    raise ModelError(f"{path}: has no model.safetensors; fetch the model again")


def parameter_count(path: str | Path) -> int:
    """Number of parameters in the folder's weight files, tied ones once; no weight is read."""
    files = safetensors_files(Path(path))
    return sum(math.prod(tensor["shape"]) for file in files for tensor in _read_header(file)[0].values())


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, or one `ModelError` line."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON: {first_line(error)}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{file}: must hold a JSON object")
    return data


def first_line(error: BaseException) -> str:
    """The first line of an error's message that has any text, or the error's kind."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:300]


def _why_no_config(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return "is an adapter; merge it into its base model first"
    if (path / "final" / "config.json").is_file():
        return f"is a run folder; its trained model is {path / 'final'}"
    if ggufs := sorted(path.glob("*.gguf")):
        return f"holds GGUF files; name the file itself, for example {ggufs[0]}"
    return "has no config.json, so it is not a Hugging Face model folder"


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensors (dtype, shape, data offsets) by name, and where its data starts."""
    try:
        with file.open("rb") as stream:
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > file.stat().st_size - 8:
                raise ValueError("its header is cut short")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for tensor in header.values():
            tensor["shape"], tensor["data_offsets"][1]
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError, LookupError, struct.error) as error:
        raise ModelError(
            f"{file}: not a safetensors file ({first_line(error)}); fetch the model again"
        ) from None
    return header, 8 + length
