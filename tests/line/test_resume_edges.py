"""Resuming where something is missing, changed or already done."""

from __future__ import annotations

from pathlib import Path

import pytest
from line_cases import KillAt, Killed, check_books, environment_file, lines_of, settings

from headrace import Line, Observer
from headrace.config import Config
from headrace.errors import LineStuckError, UserError
from headrace.line import run as run_module
from headrace.runs.folder import RunFolder


class StopAfter(Observer):
    """Stops a line after some of its units of work."""

    def __init__(self, line: Line, units: int) -> None:
        self.line, self.units = line, units

    def on_status(self, status: object) -> None:
        self.units -= 1
        if self.units == 0:
            self.line.stop()


def interrupted(config: Config, run_dir: Path, units: int = 12) -> None:
    line = Line.from_config(config, run_dir)
    assert line.run(StopAfter(line, units)).interrupted


def edit(run_dir: Path, old: str, new: str) -> None:
    path = run_dir / "config.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("torn", [False, True])
def test_without_the_first_evaluation(tmp_path: Path, torn: bool) -> None:
    """It cannot be made up for: the weights have been trained."""
    config = settings(eval={"tasks": 2}, line={"steps": 5}, sampling={"max_tokens": 12})
    interrupted(config, tmp_path / "run")
    path = tmp_path / "run" / "evaluation-before.json"
    path.write_text('{"step": 0, "accur') if torn else path.unlink()
    result = Line.resume(tmp_path / "run").run()
    assert result.before is None
    assert result.after is not None
    check_books(tmp_path / "run", config)


def test_more_steps_than_before(tmp_path: Path) -> None:
    config = settings(line={"steps": 3})
    Line.from_config(config, tmp_path / "run").run()
    with RunFolder.open(tmp_path / "run", read_only=True) as folder:
        assert folder.complete
    edit(tmp_path / "run", "steps = 3", "steps = 5")
    with RunFolder.open(tmp_path / "run", read_only=True) as folder:
        assert not folder.complete
    Line.resume(tmp_path / "run").run()
    check_books(tmp_path / "run", settings(line={"steps": 5}))


def test_an_end_that_was_cut_off_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final model and the evaluation of an earlier end do not count."""
    config = settings(line={"steps": 2}, eval={"tasks": 2}, sampling={"max_tokens": 12})
    Line.from_config(config, tmp_path / "run").run()
    edit(tmp_path / "run", "steps = 2", "steps = 3")

    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(run_module, "save_checkpoint", killed)  # it writes `final/`
    with pytest.raises(Killed):
        Line.resume(tmp_path / "run").run()
    monkeypatch.undo()
    with RunFolder.open(tmp_path / "run", read_only=True) as folder:
        assert folder.latest_checkpoint() == 3
        assert not folder.complete
    result = Line.resume(tmp_path / "run").run()
    assert result.after is not None
    assert result.after.step == 3
    with RunFolder.open(tmp_path / "run", read_only=True) as folder:
        assert folder.complete


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("groups_per_step = 2", "groups_per_step = 3", "groups_per_step was 2"),
        ("max_staleness = 1", "max_staleness = 0", "max_staleness was 1"),
        ("group_size = 2", "group_size = 4", "group_size was 2"),
        ("steps = 5", "steps = 1", "is too few"),
        ('weight_format = "float32"', 'weight_format = "int8"', "weight_format was 'float32'"),
        ("temperature = 1.0", "temperature = 0.9", r"sampling.temperature was 1.0 .* is 0.9 now"),
        ("max_tokens = 12", "max_tokens = 20", "max_tokens was 12"),
        ("max_turns = 16", "max_turns = 2", "max_turns was 16"),
        ("max_attempts = 3", "max_attempts = 2", "max_attempts was 3"),
        ("context_length = 128", "context_length = 256", "context_length was 128"),
        ("seed = 0", "seed = 1", "seed was 0"),
    ],
)
@pytest.mark.parametrize("killed", [False, True])
def test_settings_that_contradict_what_is_unfinished(
    tmp_path: Path, old: str, new: str, message: str, killed: bool
) -> None:
    """They are refused before any log is cut, with a checkpoint and with nothing but a journal."""
    config = settings(
        algorithm={"ratio": "proximal"},
        engine={"context_length": 128},
        line={"steps": 5, "checkpoint_every": 0},
        sampling={"max_tokens": 12},
    )
    if killed:
        with pytest.raises(Killed):
            Line.from_config(config, tmp_path / "run").run(KillAt(25))
    else:
        interrupted(config, tmp_path / "run", units=20)
    edit(tmp_path / "run", old, new)
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.jsonl")}
    with pytest.raises(UserError, match=message):
        Line.resume(tmp_path / "run").run()
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.jsonl")} == before


def test_two_crashes_in_a_row_without_a_checkpoint_lose_nothing(tmp_path: Path) -> None:
    config = settings(line={"steps": 5, "checkpoint_every": 0}, sampling={"max_tokens": 12})
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillAt(25))
    with RunFolder.open(tmp_path / "run", read_only=True) as folder:
        generated = folder.noted_generated()
    assert generated
    with pytest.raises(Killed):
        Line.resume(tmp_path / "run").run(KillAt(0))
    Line.resume(tmp_path / "run").run()
    check_books(tmp_path / "run", config)
    metrics = lines_of(tmp_path / "run", "metrics.jsonl")
    assert sum(m["ledger_lost"] for m in metrics) == 0
    assert metrics[-1]["tokens_generated_total"] > generated


def test_a_run_whose_environment_falls_silent_keeps_its_state(tmp_path: Path) -> None:
    name = environment_file(
        tmp_path,
        """
    def tasks(self, split):
        return [{"prompt": f"task {i}"} for i in range(50)]

    def reward(self, task, completion):
        if completion and Path(__file__).with_name("silent").exists():
            time.sleep(60)
        return float(len(completion) % 3)
""",
        imports="import time\nfrom pathlib import Path",
    )
    config = settings(
        environment={"name": name, "timeout_s": 50},
        line={"steps": 6, "checkpoint_every": 0, "wait_timeout_s": 1.0},
    )

    class FallSilent(Observer):
        def on_step(self, metrics: object) -> None:
            (tmp_path / "silent").touch()

    with pytest.raises(LineStuckError, match="--resume"):
        Line.from_config(config, tmp_path / "run").run(FallSilent())
    with RunFolder.open(tmp_path / "run", read_only=True) as folder:
        assert folder.latest_checkpoint()
    (tmp_path / "silent").unlink()
    Line.resume(tmp_path / "run").run()
    check_books(tmp_path / "run", config)
