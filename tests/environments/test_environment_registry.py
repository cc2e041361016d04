"""Finding environments, and one clear line for each way not to."""

import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.environments import load_environment
from headrace.environments.options import describe_exception
from headrace.errors import EnvironmentSetupError

LARGER = """
import random
from helper_numbers import LOW

class Larger:
    def __init__(self, high: int = 100, *, name):
        if high <= LOW:
            raise ValueError(f"high must be\\nabove {LOW}")
        self.high = high
    def tasks(self, split):
        yield {"prompt": f"{LOW} or {self.high}?"}
    def reward(self, task, completion):
        return 1.0

class Anything:
    def __init__(self, **options):
        self.options = options
    tasks = reward = lambda *args: []

class NoReward:
    def tasks(self, split):
        return []

constant = 3
"""


@pytest.fixture
def larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "helper_numbers.py").write_text("LOW = 10\n")
    path = tmp_path / "larger_task.py"
    path.write_text(LARGER)
    return path


def test_a_class_in_a_file_with_a_neighbour(larger: Path) -> None:
    environment = load_environment(f"{larger}:Larger", {"name": "x", "high": 20})
    assert next(iter(environment.tasks("train"))) == {"prompt": "10 or 20?"}
    assert sys.modules[type(environment).__module__].Larger is type(environment)


def test_relative_to_the_working_folder(larger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(larger.parent)
    assert load_environment("larger_task.py:Anything", {"any": 1}).options == {"any": 1}


def test_a_file_named_like_a_module_of_python(larger: Path) -> None:
    path = larger.with_name("random.py")
    path.write_text("class Odd:\n    tasks = reward = lambda *args: []\n")
    import random

    load_environment(f"{path}:Odd")
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmatic", {}, "'arithmatic': no such environment; did you mean 'arithmetic'?"),
        ("reasoning-gym:chain_sum", {}, "did you mean 'reasoning_gym'?"),
        ("zzz", {}, "(use arithmetic, reasoning_gym:SET, or path/to/file.py:Class)"),
        ("{folder}/missing.py:Larger", {}, "missing.py: no such file"),
        (
            "{folder}/larger_task.py:Larget",
            {},
            "'Larget'; did you mean 'Larger'? (its classes: Larger,",
        ),
        ("{folder}/larger_task.py", {}, "name the class too"),
        ("{folder}/larger_task.py:constant", {}, "is no class, it is int"),
        ("{folder}/larger_task.py:NoReward", {}, "has no method 'reward'"),
        ("{folder}/larger_task.py:Larger", {"name": 1, "hihg": 3}, "option 'hihg' of"),
        ("{folder}/larger_task.py:Larger", {"name": 1, "hihg": 3}, "did you mean 'high'?"),
        ("{folder}/larger_task.py:Larger", {"name": 1, "zzz": 3}, "it knows high, name"),
        ("{folder}/larger_task.py:NoReward", {"zzz": 3}, "it knows no options"),
        ("{folder}/larger_task.py:Larger", {}, "set environment.options.name"),
        (
            "{folder}/larger_task.py:Larger",
            {"high": 3, "name": "x"},
            "options (high=3, name='x'): ValueError: high must be above 10 ({folder}/larger_task.py:8)",
        ),
        ("{folder}/larger_task.py:Larger", {"high": "3", "name": "x"}, "TypeError: '<=' not supported"),
    ],
)
def test_mistakes_are_one_line(larger: Path, name: str, options: dict, message: str) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        load_environment(name.format(folder=larger.parent), options)
    assert message.format(folder=larger.parent) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax ({path}:1)"),
        ("\nimport missing_package\n", "ModuleNotFoundError: No module named 'missing_package' ({path}:2)"),
        ("raise SystemExit(3)\n", "SystemExit: 3 ({path}:1)"),
    ],
)
def test_a_file_that_cannot_be_imported(larger: Path, source: str, message: str) -> None:
    path = larger.with_name("broken_task.py")
    path.write_text(source)
    with pytest.raises(EnvironmentSetupError) as error:
        load_environment(f"{path}:Task")
    assert message.format(path=path) in str(error.value)
    assert "broken_task" not in sys.modules


def test_the_place_of_an_error_is_in_the_users_own_code(tmp_path: Path) -> None:
    library = tmp_path / ".venv" / "site-packages" / "library.py"
    task_file = tmp_path / "task.py"
    names: dict[str, Any] = {}
    exec(compile("def divide():\n    return 1 / 0", str(library), "exec"), names)
    with pytest.raises(ZeroDivisionError) as error:
        exec(compile("\n\ndivide()", str(task_file), "exec"), names)
    assert describe_exception(error.value, tmp_path) == f"ZeroDivisionError: division by zero ({task_file}:3)"
    assert describe_exception(error.value) == f"ZeroDivisionError: division by zero ({library}:2)"
