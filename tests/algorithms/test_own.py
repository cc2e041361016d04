"""A class of the user's own: the one from the docs trains, and what is wrong with one is said clearly."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packing_cases import ragged_groups, tiny_llama

from headrace.algorithms import Algorithm, SampleFacts, algorithm_file, load_algorithm
from headrace.config import AlgorithmConfig, TrainerConfig
from headrace.errors import ConfigError, NonFiniteError, RunError
from headrace.trainer import Trainer

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
IMPORT = "from headrace.algorithms import BUILT_IN, Algorithm, TokenLoss\nimport torch\n"
ADVANTAGES = "    def advantages(self, groups):\n        return [[float(i) for i, _ in enumerate(g)] for g in groups]\n"
LOSS = "    def loss(self, tokens):\n        return -tokens.advantages * tokens.logp\n"


def write(folder: Path, body: str, base: str = "Algorithm", imports: str = IMPORT) -> Path:
    path = folder / "mine.py"
    path.write_text(f"{imports}\n\nclass Mine({base}):\n{body}")
    return path


def load(path: Path, name: str = "Mine", file: Path | None = None, **settings: Any) -> Algorithm:
    return load_algorithm(AlgorithmConfig(name=f"{path}:{name}", **settings), file)


def make_trainer(algorithm: Algorithm) -> Trainer:
    return Trainer(tiny_llama(), algorithm, TrainerConfig(learning_rate=1e-2, micro_batch_tokens=64), 10)


def accumulate(algorithm: Algorithm) -> Trainer:
    trainer = make_trainer(algorithm)
    trainer.accumulate(ragged_groups(), version=0, max_staleness=0)
    return trainer


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return code


def test_the_example_of_the_docs_trains(tmp_path: Path) -> None:
    assert len(example().splitlines()) <= 30
    path = tmp_path / "gentle.py"
    path.write_text(example())
    algorithm = load(path, "Gentle", options={"push": 0.25})
    trainer = accumulate(algorithm)
    before = trainer.digest()
    result = trainer.step()
    assert result.updated
    assert trainer.digest() != before
    facts = [SampleFacts(reward, 1, True) for reward in (1.0, 0.0)]
    assert algorithm.advantages_of([facts]) == [[0.5, -0.125]]
    assert algorithm.teaches_nothing([SampleFacts(0.1, 1, True)] * 3)
    assert algorithm.settings.options == {"push": 0.25}
    # A sample's losses, taken apart: −min(π/μ, 2) A log π.
    losses = []
    for group in ragged_groups():
        mean = sum(t.reward for t in group) / len(group)
        for sample, logprobs in zip(group, make_trainer(algorithm).token_logprobs(group), strict=True):
            a = sample.reward - mean if len(group) > 1 else 0.0
            a = a if a > 0 else 0.25 * a
            behaviour = [lp for lp, s in zip(sample.logprobs, sample.sampled, strict=True) if s]
            losses += [-min(math.exp(p - m), 2) * a * p for p, m in zip(logprobs, behaviour, strict=True)]
    assert result.loss == pytest.approx(sum(losses) / len(losses), abs=1e-9)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            ADVANTAGES
            + "    def loss(self, tokens):\n        return (tokens.advantages * tokens.logp).sum()\n",
            r"algorithm Mine, loss: a loss must have one value per token, \[\d+\], not the shape \[\]",
        ),
        (
            ADVANTAGES
            + "    def loss(self, tokens):\n        return tokens.advantages * tokens.logp.detach()\n",
            "algorithm Mine, loss: the loss has no gradient; compute it from tokens.logp",
        ),
        (
            ADVANTAGES + "    def loss(self, tokens):\n        return 0.5\n",
            "a loss must be a tensor .*not float",
        ),
        (
            ADVANTAGES
            + "    def loss(self, tokens):\n        return TokenLoss(tokens.logp, torch.zeros(1))\n",
            "clipped tokens must have one value per token",
        ),
        (
            ADVANTAGES + "    def loss(self, tokens):\n        return tokens.rewards\n",
            r"algorithm Mine, loss: it raised AttributeError: .*rewards.* \(.*mine.py:\d+\)",
        ),
        (
            "    def advantages(self, groups):\n        return [[1.0] for _ in groups]\n" + LOSS,
            r"algorithm Mine, advantages: it returned \[1, 1, .*numbers for groups of \[4, 3, .*samples",
        ),
        (
            "    def advantages(self, groups):\n        return [1.0 for _ in groups]\n" + LOSS,
            "algorithm Mine, advantages: it must return a list of numbers per group",
        ),
        (
            "    def advantages(self, groups):\n        return groups[0][9]\n" + LOSS,
            r"algorithm Mine, advantages: it raised IndexError.*mine.py:\d+",
        ),
    ],
)
def test_what_it_returns_wrongly_is_said(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(RunError, match=message) as caught:
        accumulate(load(write(tmp_path, body)))
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_not_finite_names_class_and_trajectories(tmp_path: Path) -> None:
    body = ADVANTAGES + (
        "    def loss(self, tokens):\n"
        "        return torch.where(tokens.advantages == 3, float('nan'), tokens.logp)\n"
    )
    trainer = make_trainer(load(write(tmp_path, body)))
    with pytest.raises(NonFiniteError, match="step 1: a loss of Mine is not finite, though") as caught:
        trainer.accumulate(ragged_groups(), version=0, max_staleness=0)
    assert {(key.group, key.sample) for key in caught.value.trajectories} == {(0, 3)}, (
        "of the first micro-batch"
    )
    assert all(parameter.grad is None for parameter in trainer.module.parameters())


def test_an_advantage_that_is_not_finite_names_class_and_trajectories(tmp_path: Path) -> None:
    body = "    def advantages(self, groups):\n        return [[0.1] * (len(g) - 1) + [float('inf')] for g in groups]\n"
    with pytest.raises(NonFiniteError, match="an advantage of Mine is not finite") as caught:
        accumulate(load(write(tmp_path, body + LOSS)))
    assert len(caught.value.trajectories) == len(ragged_groups())


def test_tensors_of_advantages_will_do(tmp_path: Path) -> None:
    body = "    def advantages(self, groups):\n        return [torch.arange(len(g)) - 1.0 for g in groups]\n"
    assert load(write(tmp_path, body + LOSS)).advantages_of([[SampleFacts(0.0, 1, True)] * 3]) == [[-1, 0, 1]]


def test_a_class_says_what_it_reads_and_presets(tmp_path: Path) -> None:
    path = write(tmp_path, "    presets = {'clip_low': 0.1, 'kl_coef': 0.5}\n" + ADVANTAGES + LOSS)
    assert load(path).settings.clip_low == 0.1
    assert load(path).settings.kl_coef == 0.5
    assert load(path, clip_low=0.3).settings.clip_low == 0.3
    again = AlgorithmConfig(**load(path, clip_low=0.3).settings.model_dump(mode="json", exclude_none=True))
    assert load_algorithm(again).settings == load(path, clip_low=0.3).settings
    with pytest.raises(ConfigError, match=r"Mine does not read algorithm\.clip_high; .*algorithm\.options"):
        load(path, clip_high=0.3)


def test_a_class_may_derive_from_a_built_in_one(tmp_path: Path) -> None:
    path = write(tmp_path, "    pass\n", base='BUILT_IN["dapo"]')
    mine = load(path, clip_high=0.4)
    assert (mine.settings.zero_advantage, mine.settings.clip_high) == ("replace", 0.4)
    assert accumulate(mine).step().updated


@pytest.mark.parametrize(
    ("body", "settings", "message"),
    [
        (ADVANTAGES, {}, "the constructor of Mine raised .*abstract.*loss"),
        (
            "    def __init__(self, a): pass\n" + ADVANTAGES + LOSS,
            {},
            "needs the option 'a': set algorithm.options.a",
        ),
        (
            "    def __init__(self, push=1): pass\n" + ADVANTAGES + LOSS,
            {"options": {"psh": 2}},
            "unknown option algorithm.options.psh of Mine; did you mean 'push'",
        ),
        (
            ADVANTAGES + LOSS,
            {"options": {"a": 2}},
            "unknown option algorithm.options.a of Mine; it knows no options",
        ),
        (
            "    def __init__(self, a=1): raise KeyError(a)\n" + ADVANTAGES + LOSS,
            {"options": {"a": 2}},
            r"the constructor of Mine raised with options \(a=2\): KeyError: 2 \(.*mine.py:\d+\)",
        ),
        ("    scope = 'step'\n" + ADVANTAGES + LOSS, {}, 'scope must be "group" or "batch"'),
        ("    presets = {'clip': 1}\n" + ADVANTAGES + LOSS, {}, "presets names 'clip', which is no setting"),
        (
            "    presets = {'clip_low': -1.0}\n" + ADVANTAGES + LOSS,
            {},
            "the presets of Mine: algorithm.clip_low",
        ),
        (
            "    scope = 'batch'\n" + ADVANTAGES + LOSS,
            {"zero_advantage": "replace"},
            '"replace" cannot go with Mine, whose scope is "batch"',
        ),
        ("    x = 1 / 0\n", {}, r"mine.py cannot be imported: ZeroDivisionError.*mine.py:\d+"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    tmp_path: Path, body: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(write(tmp_path, body), **settings)
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_class_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, ADVANTAGES + LOSS)
    with pytest.raises(
        ConfigError, match=r"has no class 'Mien'; did you mean 'Mine'\? \(its algorithms: Mine\)"
    ):
        load(path, "Mien")
    with pytest.raises(ConfigError, match="no subclass of headrace"):
        load(path, "torch")
    with pytest.raises(ConfigError, match=r"no such file; did you mean 'mine\.py'"):
        load(tmp_path / "mime.py")


def test_a_kept_copy_is_executed_instead_and_still_finds_neighbours(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "a_neighbour_of_mine.py").write_text("FACTOR = 2.0\n")
    path = write(tmp_path / "home", ADVANTAGES + LOSS, imports=IMPORT + "import a_neighbour_of_mine\n")
    kept = tmp_path / "kept.py"
    kept.write_text(path.read_text())
    write(tmp_path / "home", ADVANTAGES.replace("float(i)", "2.0 * i") + LOSS)
    config = AlgorithmConfig(name=f"{path}:Mine")
    assert algorithm_file(config) == path
    assert algorithm_file(AlgorithmConfig()) is None
    facts = [[SampleFacts(0.0, 1, True)] * 2]
    new, old = load_algorithm(config), load_algorithm(config, kept)
    assert (new.advantages_of(facts), old.advantages_of(facts)) == ([[0, 2]], [[0, 1]])
    path.unlink()
    assert not list(tmp_path.rglob("__pycache__/kept*")), "a run's folder stays as it is"
    assert load_algorithm(config, kept).advantages_of(facts) == [[0, 1]]
    assert old.settings == new.settings == load_algorithm(config, kept).settings


def test_losses_may_be_in_another_precision(tmp_path: Path) -> None:
    body = (
        ADVANTAGES + "    def loss(self, tokens):\n        return -tokens.advantages * tokens.logp.float()\n"
    )
    assert accumulate(load(write(tmp_path, body))).step().updated
    assert torch.get_default_dtype() == torch.float32
