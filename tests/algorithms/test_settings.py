"""Settings of `[algorithm]`: presets, what is refused, and that saved ones are read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from headrace.algorithms import BUILT_IN, load_algorithm
from headrace.config import AlgorithmConfig, Config
from headrace.errors import ConfigError
from headrace.presets import COMMON, PRESETS

BASE = {"model": {"name": "tiny-random"}, "environment": {"name": "arithmetic"}}

BEFORE_NAMES = {
    "name": "grpo",
    "group_size": 8,
    "loss_aggregation": "sequence",
    "normalize_std": False,
    "ratio": "proximal",
    "clip_low": 0.1,
    "clip_high": 0.3,
    "importance_cap": 3.0,
    "kl_coef": 0.01,
    "zero_advantage": "replace",
    "mask_truncated": True,
}
"""A saved `[algorithm]` with every setting of `grpo` alone written out."""


def config(**algorithm: Any) -> Config:
    return Config.from_dict({**BASE, "algorithm": algorithm})


def load(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(BASE) + text)
    return Config.load(path, overrides)


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_presets_what_it_reads_and_is_read_back(name: str) -> None:
    loaded = config(name=name)
    expected = PRESETS[name] | ({"max_length": 256} if name == "dr_grpo" else {})
    assert {key: getattr(loaded.algorithm, key) for key in expected} == expected
    saved = loaded.to_dict()
    assert saved["algorithm"].keys() <= {"name", *expected}
    again = Config.from_dict(saved)
    assert again == loaded
    assert again.to_dict() == saved
    assert load_algorithm(loaded.algorithm).settings == loaded.algorithm
    assert type(load_algorithm(loaded.algorithm)) is BUILT_IN[name]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_possible_values(name: str) -> None:
    """A preset must not be refused by the setting's own limits, nor depend on the order of names."""
    assert set(COMMON) - {"zero_advantage"} <= set(PRESETS[name]) <= set(AlgorithmConfig.model_fields)


def test_the_default_is_grpo_as_it_always_was() -> None:
    assert Config.from_dict(BASE).algorithm == AlgorithmConfig(name="grpo")
    assert PRESETS["grpo"] == COMMON | {
        "normalize_std": True,
        "ratio": "behaviour",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
        "importance_cap": 2.0,
    }


def test_settings_saved_in_full_are_read() -> None:
    loaded = config(**BEFORE_NAMES).algorithm
    assert {key: getattr(loaded, key) for key in BEFORE_NAMES} == BEFORE_NAMES


def test_a_preset_is_overridden(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, '[algorithm]\nname = "dapo"\n', "algorithm.zero_advantage=count", "algorithm.dual_clip=3.0"
    )
    assert (loaded.algorithm.zero_advantage, loaded.algorithm.dual_clip) == ("count", 3.0)
    assert loaded.algorithm.clip_high == 0.28


def test_l_max_is_the_most_that_the_policy_may_sample() -> None:
    sampling = {"sampling": {"max_tokens": 40}, "algorithm": {"name": "dr_grpo"}}
    assert Config.from_dict({**BASE, **sampling}).algorithm.max_length == 40
    episodes = {"environment": {"name": "arithmetic", "max_episode_tokens": 99}}
    assert Config.from_dict({**BASE, **sampling, **episodes}).algorithm.max_length == 99
    assert config(name="dr_grpo", max_length=7).algorithm.max_length == 7
    with pytest.raises(ConfigError, match=r"needs algorithm\.max_length"):
        load_algorithm(AlgorithmConfig(name="dr_grpo"))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "rloo", "clip_low": 0.2}, "rloo does not read algorithm.clip_low; remove it"),
        (
            {"name": "icepop", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
            "does not read algorithm.clip_high, algorithm.clip_low, algorithm.dual_clip; remove them",
        ),
        ({"name": "reinforce", "zero_advantage": "replace"}, "does not read algorithm.zero_advantage"),
        ({"name": "grpo", "ratio_band": 3.0}, "does not read algorithm.ratio_band"),
        ({"name": "grpo", "options": {"a": 1}}, "does not read algorithm.options"),
        ({"clip_lo": 0.2}, "unknown setting 'algorithm.clip_lo'; did you mean 'algorithm.clip_low'"),
        ({"name": "drgrpo"}, "no such algorithm; did you mean 'dr_grpo'"),
        ({"name": "nothing_like_it"}, r"no such algorithm \(use grpo, .*path/to/file.py:Class"),
        ({"name": "mine.py"}, "name the class too: .*mine.py:CLASS"),
        ({"name": 3}, "algorithm.name = 3: .*string"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"max_length": 5}, 'max_length is read with loss_aggregation = "constant" only'),
        ({"group_size": 1}, "use at least 2"),
        ({"name": "dsis", "group_size": 1}, "use at least 2"),
    ],
)
def test_what_is_wrong_is_one_line_before_any_work(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config(**algorithm)
    assert "\n" not in str(caught.value)


def test_one_sample_per_task_needs_a_baseline_over_the_batch() -> None:
    assert config(name="reinforce", group_size=1).algorithm.group_size == 1


@pytest.mark.parametrize("name", PRESETS)
def test_int8_rollouts_need_a_correction(name: str) -> None:
    def int8(**algorithm: Any) -> Config:
        return Config.from_dict(
            {**BASE, "engine": {"weight_format": "int8"}, "algorithm": {"name": name, **algorithm}}
        )

    if name in ("rloo", "reinforce", "cispo", "icepop", "dsis"):
        assert int8().engine.weight_format == "int8"
    elif name == "gspo":
        with pytest.raises(ConfigError, match=r'cannot go with algorithm\.name = "gspo"'):
            int8()
    else:
        with pytest.raises(ConfigError, match=r'needs algorithm\.ratio = "proximal"'):
            int8()
        assert int8(ratio="proximal").engine.weight_format == "int8"


def test_a_file_is_relative_to_the_settings(tmp_path: Path) -> None:
    loaded = load(tmp_path, '[algorithm]\nname = "mine.py:Mine"\noptions = { push = 0.3 }\n').algorithm
    assert loaded.name == f"{tmp_path / 'mine.py'}:Mine"
    assert loaded.file == tmp_path / "mine.py"
    assert loaded.options == {"push": 0.3}
    assert (loaded.group_size, loaded.kl_coef, loaded.zero_advantage) == (8, 0.0, "count")
    assert config().algorithm.file is None


def test_the_docs_say_what_each_name_presets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = [
        [c.strip(" `") for c in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"
    ]
    header = next(
        [c.strip(" `") for c in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| setting")
    )
    table = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows if len(row) == len(header)}
    assert {row[0] for row in rows if len(row) == 5} == set(PRESETS) == set(header[1:])

    def shown(value: Any) -> str:
        return "unset" if value is None else str(value).lower()

    for key in {key for presets in PRESETS.values() for key in presets}:
        said = table.get(key) or dict.fromkeys(PRESETS, shown(COMMON[key]))
        for name, presets in PRESETS.items():
            expected = shown(presets[key]) if key in presets else "—"
            assert said[name] in (expected, f"{presets.get(key)}"), (key, name)
            if "e-" in expected:
                assert float(said[name]) == presets[key]
