"""Every architecture goes through the whole line: load, generate, reward, train, publish, generate, checkpoint."""

from __future__ import annotations

from pathlib import Path

from line_cases import check_books, environment_file, lines_of, settings

from architectures import plain_module, save_folder
from headrace import Line

LOGPROB_DIFF = 1e-4
"""Rounding of float32 over two layers."""


def test_two_steps(name: str, tmp_path: Path) -> None:
    folder = save_folder(plain_module(name), tmp_path / "model")
    environment = environment_file(
        tmp_path,
        """
    def tasks(self, split):
        for i in range(1000):
            yield {"prompt": f"task {i}"}

    def reward(self, task, completion):
        return sum(i * ord(c) for i, c in enumerate(completion)) % 1009 / 1009
""",
    )
    config = settings(
        model={"name": str(folder)},
        environment={"name": environment},
        sampling={"max_tokens": 8},
        trainer={"learning_rate": 1e-2},
        line={"steps": 2, "max_staleness": 0, "checkpoint_every": 2},
        engine={"context_length": 64},
    )
    result = Line.from_config(config, tmp_path / "run").run()
    check_books(result.run_dir, config)
    for metrics in lines_of(result.run_dir, "metrics.jsonl"):
        assert metrics["grad_norm"] > 0
        assert metrics["logprob_diff_tokens"] > 0
        assert metrics["logprob_diff_max"] < LOGPROB_DIFF
