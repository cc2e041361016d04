"""From `environment.name` and `environment.options` to an environment.

Invariant: whatever is wrong with either is one `EnvironmentSetupError` line. User code is imported and run
here, so this is called in worker processes only.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.environments.arithmetic import Arithmetic
from headrace.environments.base import ConversationEnvironment, Environment, is_conversation
from headrace.environments.options import describe_exception, reject_unknown, suggest
from headrace.errors import EnvironmentSetupError

BUILT_IN: dict[str, type[Environment]] = {"arithmetic": Arithmetic}
_REASONING_GYM = "reasoning_gym"


def load_environment(
    name: str, options: Mapping[str, Any] | None = None
) -> Environment | ConversationEnvironment:
    """Build the environment that `name` names. Arguments and errors are those of `environment_builder`."""
    return environment_builder(name, options)()


def environment_builder(
    name: str, options: Mapping[str, Any] | None = None
) -> Callable[[], Environment | ConversationEnvironment]:
    """What builds the environment that `name` names, a new instance at each call.

    Args:
        name: a built-in (`arithmetic`), `reasoning_gym:SET`, or `path/to/file.py:Class`. The file's folder is
            put on the import path, so that it can import its neighbours.
        options: keyword arguments of its constructor.

    Raises:
        EnvironmentSetupError: it does not exist, does not know an option, or (when it is called) its constructor
            raised or gave no environment.
    """
    options = dict(options or {})
    if name in BUILT_IN:
        return _builder(BUILT_IN[name], name, options, folder=None)
    prefix, separator, rest = name.partition(":")
    if prefix == _REASONING_GYM and separator:
        from headrace.environments.reasoning_gym import ReasoningGym

        return lambda: ReasoningGym(rest, options)
    file, separator, class_name = name.rpartition(":")
    if separator and file.endswith(".py"):
        path = Path(file).expanduser().resolve()
        return _builder(_find_class(path, class_name), name, options, folder=path.parent)
    if name.endswith(".py"):
        hint = _classes_hint(_import_file(Path(name).expanduser().resolve()))
        raise EnvironmentSetupError(f"environment.name = {name!r}: name the class too: {name}:CLASS{hint}")
    raise EnvironmentSetupError(
        f"environment.name = {name!r}: no such environment{suggest(name, [*BUILT_IN, _REASONING_GYM])} "
        f"(use {', '.join(BUILT_IN)}, reasoning_gym:SET, or path/to/file.py:Class)"
    )


def environment_folder(name: str) -> Path | None:
    """The folder of the user's file that `name` names, or None for what headrace brings along."""
    file, separator, _ = name.rpartition(":")
    return Path(file).expanduser().resolve().parent if separator and file.endswith(".py") else None


def _find_class(path: Path, class_name: str) -> Any:
    module = _import_file(path)
    found = getattr(module, class_name, None)
    if found is None:
        hint = suggest(class_name, _classes(module)) + _classes_hint(module)
        raise EnvironmentSetupError(f"{path} has no class {class_name!r}{hint}")
    if not callable(found):
        raise EnvironmentSetupError(f"{path}:{class_name} is no class, it is {type(found).__name__}")
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = suggest(path.name, [file.name for file in path.parent.glob("*.py")])
        raise EnvironmentSetupError(
            f"environment file {path}: no such file{near}; a relative path is relative to the settings file"
        )
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs, as an import does: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise EnvironmentSetupError(
            f"environment file {path} cannot be imported: {describe_exception(error, path.parent)}"
        ) from None
    return module


def _module_name(path: Path) -> str:
    """The file's own module name, so that neighbours can import it; another one if that name is taken."""
    taken = sys.modules.get(path.stem)
    if path.stem in sys.stdlib_module_names or (taken and getattr(taken, "__file__", None) != str(path)):
        return f"{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    return path.stem


def _classes(module: ModuleType) -> list[str]:
    own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    return [value.__name__ for value in own if inspect.isclass(value)]


def _classes_hint(module: ModuleType) -> str:
    return f" (its classes: {', '.join(_classes(module)) or 'none'})"


def _builder(
    constructor: Any, name: str, options: dict[str, Any], folder: Path | None
) -> Callable[[], Environment | ConversationEnvironment]:
    parameters = inspect.signature(constructor).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        reject_unknown(options, [p.name for p in named], name)
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise EnvironmentSetupError(
                f"{name} needs the option {parameter.name!r}: set environment.options.{parameter.name}"
            )
    return lambda: _construct(constructor, name, options, folder)


def _construct(
    constructor: Any, name: str, options: dict[str, Any], folder: Path | None
) -> Environment | ConversationEnvironment:
    try:
        environment: Environment | ConversationEnvironment = constructor(**deepcopy(options))
    except EnvironmentSetupError:
        raise
    except (Exception, SystemExit) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise EnvironmentSetupError(
            f"the constructor of {name} raised with options ({shown}): {describe_exception(error, folder)}"
        ) from None
    _check_form(environment, name)
    return environment


def _check_form(environment: object, name: str) -> None:
    """Refuse what has neither form in full."""
    has = {
        method: callable(getattr(environment, method, None))
        for method in ("tasks", "reward", "reset", "step", "snapshot", "restore")
    }
    conversation = is_conversation(environment)
    if not conversation and not (has["tasks"] and has["reward"]):
        wanted = ("tasks", "reset", "step") if has["reset"] or has["step"] else ("tasks", "reward")
        missing = next(method for method in wanted if not has[method])
        raise EnvironmentSetupError(
            f"{name} has no method {missing!r}; an environment has tasks and reward or, to talk over several turns, "
            "tasks, reset and step"
        )
    if conversation and has["snapshot"] != has["restore"]:
        present, missing = ("snapshot", "restore") if has["snapshot"] else ("restore", "snapshot")
        raise EnvironmentSetupError(f"{name} has {present} but no {missing}; it needs both, or neither")
