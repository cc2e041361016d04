"""A line as its user holds it: built from settings or from the folder of an earlier run, then run once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.config import Config
from headrace.engine.kv import shared_name_of
from headrace.line.observer import Observer
from headrace.line.run import Run
from headrace.line.setup import prepare
from headrace.runs.folder import RunFolder
from headrace.runs.results import LineResult


class Line:
    """One run. Build it with `from_toml`, `from_config` or `resume`, then call `run` once."""

    def __init__(self, config: Config, run_dir: Path, resume: bool = False) -> None:
        self.config = config
        self.run_dir = run_dir
        self._resume = resume
        self._stop = False

    @classmethod
    def from_toml(
        cls, path: str | Path, overrides: Sequence[str] = (), run_dir: str | Path | None = None
    ) -> Line:
        """A new run from a settings file.

        Args:
            overrides: `section.key=value` strings, as the command line's `--set`.
            run_dir: the run's folder, which must not exist; `runs/<name>-<number>` by default.

        Raises:
            ConfigError: the settings are wrong.
        """
        return cls.from_config(Config.load(path, overrides), run_dir, name=Path(path).stem)

    @classmethod
    def from_config(cls, config: Config, run_dir: str | Path | None = None, name: str = "run") -> Line:
        """A new run from settings."""
        return cls(config, Path(run_dir) if run_dir is not None else RunFolder.fresh("runs", name))

    @classmethod
    def resume(cls, run_dir: str | Path) -> Line:
        """Continue a run from its last checkpoint, or from step 0 when it has none.

        Raises:
            UserError: not a run folder.
        """
        with RunFolder.open(run_dir, read_only=True) as folder:
            return cls(folder.config, folder.path, resume=True)

    def stop(self) -> None:
        """Ask a running line to finish its unit, write a checkpoint and return."""
        self._stop = True

    def run(self, observer: Observer | None = None) -> LineResult:
        """Train to the end, or until `stop`.

        Raises:
            UserError: something is wrong with the input; nothing was started.
            RunError: the run cannot go on; what it logged and its checkpoints are intact.
        """
        observer = observer or Observer()
        if not self._resume:
            RunFolder.refuse_existing(self.run_dir)
        name = shared_name_of(self.run_dir)
        with prepare(self.config, output=observer.output, kv_shared_name=name) as workplace:
            opened = (
                RunFolder.open(self.run_dir) if self._resume else RunFolder.create(self.run_dir, self.config)
            )
            with opened as folder:
                return Run(workplace, folder, observer, lambda: self._stop).run(self._resume)
