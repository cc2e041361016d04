"""Any data set of reasoning-gym, as an environment.

Invariants
* The package seeds item i of a data set with `seed + i`; "test" starts 2^30 seeds after "train", so the
  splits share no seed. (Where a data set has few possible questions, two seeds can ask the same one.)
* A task carries the whole entry that it is scored against: some data sets do not generate an entry twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.environments.options import reject_unknown, suggest
from headrace.errors import EnvironmentSetupError

_TEST_SEED_OFFSET = 1 << 30
_MAX_SEED = 1 << 31
"""Seeds stay below 2^32, which is as far as NumPy's go."""


class ReasoningGym:
    """One reasoning-gym data set. A task has "prompt", "answer" (None where the set has none) and "entry".

    The answer that is scored is what stands in the last `<answer>…</answer>` of a completion or, if there is
    none, the whole completion without the white space around it.

    Args:
        name: the data set's registered name, such as `chain_sum`.
        options: fields of the set's configuration, among them `size` (tasks per split) and `seed` (0).

    Raises:
        EnvironmentSetupError: the package is missing, or the set or an option of it is unknown or impossible.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        try:
            from reasoning_gym.factory import DATASETS
            from reasoning_gym.utils import extract_answer
        except ImportError as error:
            raise EnvironmentSetupError(
                f"reasoning_gym:{name} needs the package reasoning-gym ({error}); "
                "run: pip install 'headrace[reasoning-gym]'"
            ) from None
        import reasoning_gym  # registers the data sets

        if name not in DATASETS:
            raise EnvironmentSetupError(
                f"reasoning_gym:{name}: no such data set{suggest(name, DATASETS)} "
                f"({len(DATASETS)} are known to reasoning-gym {reasoning_gym.__version__})"
            )
        fields = [field.name for field in dataclasses.fields(DATASETS[name][1])]
        reject_unknown(options, fields, f"reasoning_gym:{name}")
        options = {**options, "seed": options.get("seed", 0)}
        _check_integer("seed", options["seed"], 0, _MAX_SEED - 1)
        if "size" in options:
            _check_integer("size", options["size"], 1, _TEST_SEED_OFFSET)
        self._name = name
        self._extract_answer = extract_answer
        self._train = self._build(options)
        self._test = self._build({**options, "seed": options["seed"] + _TEST_SEED_OFFSET})

    def tasks(self, split: str) -> Sequence[dict[str, Any]]:
        return _Tasks(self._test if split == "test" else self._train)

    def reward(self, task: dict[str, Any], completion: str) -> float:
        """The data set's score of the answer, usually 0 to 1. An answer that it cannot parse scores 0.0."""
        answer = self._extract_answer(completion)
        if answer is None:
            answer = completion.strip()
        entry = unpack(task["entry"])
        try:
            return float(self._train.score_answer(answer, entry))
        except Exception:
            # Some data sets raise on text they cannot parse. Then the completion is wrong and the environment
            # is not broken, unless it fails on its own answer too.
            self._train.score_answer(entry["answer"], entry)
            return 0.0

    def _build(self, options: dict[str, Any]) -> Any:
        from reasoning_gym.factory import create_dataset

        if self._name == "composite":
            options = {**options, "datasets": _composite_specs(options.get("datasets"))}
        try:
            return create_dataset(self._name, **options)
        except Exception as error:
            message = " ".join(str(error).split()) or type(error).__name__
            raise EnvironmentSetupError(f"reasoning_gym:{self._name}: wrong options: {message}") from None


class _Tasks(Sequence[dict[str, Any]]):
    """A data set's entries as tasks, generated when they are read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._dataset[index]
        return {"prompt": entry["question"], "answer": entry["answer"], "entry": pack(entry)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def pack(value: Any) -> Any:
    """`value` with tuples and dicts of non-text keys written so that JSON gives them back; see `unpack`."""
    if isinstance(value, tuple):
        return {"tuple": [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    return value


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(unpack(item) for item in value["tuple"])
        return {unpack(key): unpack(item) for key, item in value["dict"]}
    return value


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise EnvironmentSetupError(
            f"environment.options.{name} must be an integer from {least} to {most}, not {value!r}"
        )


def _composite_specs(datasets: object) -> list[Any]:
    from reasoning_gym.composite import DatasetSpec

    example = 'datasets = [{name = "chain_sum", weight = 1.0, config = {max_terms = 3}}]'
    if not isinstance(datasets, list) or not datasets:
        raise EnvironmentSetupError(f"reasoning_gym:composite: write {example}")
    specs = []
    for spec in datasets:
        if not isinstance(spec, dict) or not {"name"} <= spec.keys() <= {"name", "weight", "config"}:
            raise EnvironmentSetupError(f"reasoning_gym:composite: {spec!r}: write {example}")
        if "seed" in spec.get("config", {}):
            raise EnvironmentSetupError(
                "reasoning_gym:composite: set environment.options.seed instead of a part's own seed, which "
                "would give both splits the same tasks"
            )
        specs.append(DatasetSpec(spec["name"], float(spec.get("weight", 1.0)), spec.get("config", {})))
    return specs
