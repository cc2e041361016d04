"""From `[algorithm]` to an algorithm: a built-in one, or a class in a file of the user's.

Invariant: whatever is wrong with the settings or the file is one `ConfigError` line.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections.abc import Mapping
from copy import deepcopy
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from headrace.algorithms.base import Algorithm
from headrace.algorithms.cispo import Cispo
from headrace.algorithms.dapo import Dapo
from headrace.algorithms.dr_grpo import DrGrpo
from headrace.algorithms.dsis import Dsis
from headrace.algorithms.grpo import Grpo
from headrace.algorithms.gspo import Gspo
from headrace.algorithms.icepop import Icepop
from headrace.algorithms.reinforce import Reinforce
from headrace.algorithms.rloo import Rloo
from headrace.config import AlgorithmConfig, describe
from headrace.errors import ConfigError
from headrace.presets import COMMON

BUILT_IN: dict[str, type[Algorithm]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "rloo": Rloo,
    "reinforce": Reinforce,
    "cispo": Cispo,
    "icepop": Icepop,
    "dsis": Dsis,
}


def load_algorithm(config: AlgorithmConfig, file: Path | None = None) -> Algorithm:
    """The algorithm that `config` names. Its `settings` are those in force: `config` with every preset filled in.

    Args:
        file: a copy to execute in the place of the file that `config.name` names; it may still import the neighbours of
            that one.

    Raises:
        ConfigError: the file or class does not exist or cannot be made, or a setting is not read.
    """
    path = config.file
    if path is None:
        algorithm = BUILT_IN[config.name]()
        algorithm.settings = config
    else:
        if path.parent.is_dir() and str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        made = _find_class(file or path, config.name.rpartition(":")[2])
        settings = _with_presets(config, made)
        algorithm = _construct(made, settings)
        algorithm.settings = settings
    if algorithm.settings.loss_aggregation == "constant" and algorithm.settings.max_length is None:
        raise ConfigError(
            'algorithm.loss_aggregation = "constant" needs algorithm.max_length, the length that sums are divided by'
        )
    return algorithm


def algorithm_file(config: AlgorithmConfig) -> Path | None:
    """The user's file that must be kept so that steps can be taken again; None for a built-in algorithm."""
    return config.file


def _find_class(path: Path, class_name: str) -> type[Algorithm]:
    module = _import_file(path)
    found = getattr(module, class_name, None)
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    ]
    if not inspect.isclass(found) or not issubclass(found, Algorithm):
        names = [value.__name__ for value in own]
        known = f"its algorithms: {', '.join(names) or 'none'}"
        if found is not None:
            raise ConfigError(
                f"{path}:{class_name} is no subclass of headrace.algorithms.Algorithm ({known})"
            )
        raise ConfigError(f"{path} has no class {class_name!r}{_suggest(class_name, names)} ({known})")
    if found.scope not in ("group", "batch"):
        raise ConfigError(f'{path}:{class_name}: scope must be "group" or "batch", not {found.scope!r}')
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = _suggest(path.name, [file.name for file in path.parent.glob("*.py")])
        raise ConfigError(
            f"algorithm file {path}: no such file{near}; a relative path is relative to the settings file"
        )
    # Named after its place, so that a file and a kept copy of it are two modules.
    name = f"{path.stem}_{blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # before it runs, as an import does: dataclasses look it up
    try:
        # Not through the import system, which would leave compiled files in a run's folder and might take old ones.
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"algorithm file {path} cannot be imported: {_describe(error)}") from None
    return module


def _with_presets(config: AlgorithmConfig, made: type[Algorithm]) -> AlgorithmConfig:
    """The user's settings over the class's presets, and those over what every algorithm has."""
    name = made.__name__
    known = AlgorithmConfig.model_fields.keys() - {"name", "options"}
    for key in made.presets:
        if key not in known:
            raise ConfigError(f"{name}.presets names {key!r}, which is no setting of [algorithm]")
    presets = {**COMMON, **made.presets}
    given = config.model_dump(mode="python", exclude_unset=True)
    unread = sorted(given.keys() - presets.keys() - {"name", "options"})
    if unread:
        raise ConfigError(
            f"{name} does not read {', '.join(f'algorithm.{key}' for key in unread)}; put what its constructor takes "
            f"into algorithm.options, or name the setting in {name}.presets"
        )
    if made.scope == "batch" and {**presets, **given}["zero_advantage"] == "replace":
        raise ConfigError(
            f'algorithm.zero_advantage = "replace" cannot go with {name}, whose scope is "batch": a group is known to '
            'teach nothing only when the batch is complete; use "count"'
        )
    try:
        return AlgorithmConfig.model_validate({**presets, **given})
    except ValidationError as error:
        raise ConfigError(f"the presets of {name}: algorithm.{describe(error, AlgorithmConfig)}") from None


def _construct(made: type[Algorithm], settings: AlgorithmConfig) -> Algorithm:
    name, options = made.__name__, settings.options
    _check_options(made, options)
    try:
        return made(**deepcopy(options))
    except (Exception, SystemExit) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(
            f"the constructor of {name} raised with options ({shown}): {_describe(error)}"
        ) from None


def _check_options(made: type[Algorithm], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(made).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in options:
            if key not in named:
                hint = _suggest(key, list(named)) or f"; it knows {', '.join(named) or 'no options'}"
                raise ConfigError(f"unknown option algorithm.options.{key} of {made.__name__}{hint}")
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(f"{made.__name__} needs the option {key!r}: set algorithm.options.{key}")


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _describe(error: BaseException) -> str:
    """`Type: message (file:line)` on one line."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
