"""Settings: overrides, paths, and one clear line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import MODEL_ALIASES, Config
from headrace.errors import ConfigError
from headrace.models import aliases

MINIMAL = '[model]\nname = "tiny-random"\n[environment]\nname = "arithmetic"\n'


def load(tmp_path: Path, text: str = MINIMAL, overrides: tuple[str, ...] = ()) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return Config.load(path, overrides)


def test_defaults_and_overrides(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        overrides=(
            "line.steps=3",
            "trainer.learning_rate = 2e-5",
            "environment.options.minimum=2",
            "engine.kv_on_update=keep",
            'sampling.stop=["\\n"]',
        ),
    )
    assert config.line.steps == 3
    assert config.trainer.learning_rate == 2e-5
    assert config.environment.options == {"minimum": 2}
    assert config.engine.kv_on_update == "keep"
    assert config.sampling.stop == ["\n"]


def test_the_resolved_settings_are_read_back_unchanged(tmp_path: Path) -> None:
    import tomli_w

    config = load(tmp_path)
    again = load(tmp_path, tomli_w.dumps(config.to_dict()))
    assert again == config


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = '[model]\nname = "./weights"\n[environment]\nname = "task.py:Mine"\n'
    config = load(tmp_path, text)
    assert config.model.name == str(tmp_path / "weights")
    assert config.environment.name == f"{tmp_path / 'task.py'}:Mine"


def test_an_alias_is_never_a_path(tmp_path: Path) -> None:
    assert set(MODEL_ALIASES) == set(aliases())
    (tmp_path / "tiny-random").mkdir()
    assert load(tmp_path).model.name == "tiny-random"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rat=1", "--set: .*did you mean 'trainer.learning_rate'"),
        ("trainr.learning_rate=1", "did you mean 'trainer'"),
        ("line.steps=many", "line.steps"),
        ("line.steps=0", "greater than or equal to 1"),
        ("line.max_staleness=-1", "greater than or equal to 0"),
        ("algorithm.group_size=1", "use at least 2"),
        ("sampling.top_p=0.9", "training with top_p or top_k is refused"),
        ("sampling.temperature=inf", "finite"),
        ("trainer.betas=[0.9, 1.0]", "betas must lie in"),
        ("model.dtype=float16", "float32"),
        ("engine.weight_format=int4", "'float32' or 'int8'"),
        (
            "engine.weight_format=int8",
            '^--set: engine.weight_format = "int8" needs algorithm.ratio = "proximal"',
        ),
        ("steps=3", "section.key=value"),
        ("line.steps.more=3", "valid integer"),
        ("line=3", "section.key=value"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, overrides=(override,))
    assert "\n" not in str(caught.value)


def test_quantised_rollouts_with_all_they_need(tmp_path: Path) -> None:
    config = load(tmp_path, overrides=("engine.weight_format=int8", "algorithm.ratio=proximal"))
    assert config.engine.weight_format == "int8"


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Config.load(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path, "[model\n")
    with pytest.raises(ConfigError, match="required"):
        load(tmp_path, "[model]\nname = 'x'\n")


def test_the_file_is_blamed_for_what_is_wrong_in_it(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"config.toml: unknown setting 'line.stpes'; did you mean 'line.steps'"
    ):
        load(tmp_path, MINIMAL + "[line]\nstpes = 3\n", ("line.steps=4",))


def test_an_override_may_complete_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, '[environment]\nname = "arithmetic"\n', ("model.name=tiny-random",)).model.name
