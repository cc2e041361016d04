"""The settings of a run: small, typed, read from TOML, with `a.b=c` overrides.

Invariants
* An unknown key, a wrong type or an impossible value raises one `ConfigError` line, before any work.
* Paths in a configuration are relative to the file they stand in; a resolved `Config` holds absolute ones.
* This module imports no torch.
"""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from headrace.errors import ConfigError
from headrace.presets import BATCH_SCOPE, CORRECTING, PRESETS, unread

LONGEST_WAIT_S = 1e6
"""Upper limit of settings that are waits; clocks and sockets refuse much longer ones."""

MODEL_ALIASES = ("smollm2-135m", "tiny-random")
"""Model names that always mean the same model, whatever files lie about."""


class Section(BaseModel):
    """A table of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class ModelConfig(Section):
    """`[model]`: which weights to start from, and where they live."""

    name: str = Field(
        description="An alias (`smollm2-135m`, `tiny-random`), a Hugging Face folder, a GGUF file or a hub id."
    )
    dtype: Literal["float32", "float64"] = Field(
        "float32", description="Precision of weights, activations and KV; float64 is for tests."
    )
    device: Literal["cpu", "cuda", "mps"] = Field("cpu", description="Where the model's tensors live.")


class EnvironmentConfig(Section):
    """`[environment]`: where tasks come from, and the rewards or worlds that answer."""

    name: str = Field(
        description="A built-in (`arithmetic`), `reasoning_gym:SET`, or `path/to/file.py:Class` of your own."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment's constructor."
    )
    workers: int = Field(1, ge=1, le=256, description="Worker processes for rewards or episodes.")
    timeout_s: float = Field(
        30.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Seconds that a reward, or a method of an episode's world, may take; past it the attempt has "
        "failed, and a worker that is still busy with it is killed.",
    )
    max_attempts: int = Field(
        3,
        ge=1,
        description="Attempts at one sample before it counts as failed for good and leaves its group.",
    )
    max_turns: int = Field(
        16, ge=1, description="Turns of the policy in one episode of several turns; after them it ends."
    )
    max_episode_tokens: int | None = Field(
        None, ge=1, description="Tokens that the policy may sample over all turns of an episode."
    )
    episode_timeout_s: float = Field(
        600.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Seconds that an episode's world may take for its answers in all; past it the attempt has failed. "
        "Waiting for a place in a worker is not counted; `line.wait_timeout_s` bounds that, as any wait for replies.",
    )
    episodes_per_worker: int = Field(
        64,
        ge=1,
        le=4096,
        description="Live episodes of several turns in one worker process; others wait for a place.",
    )


class SamplingConfig(Section):
    """`[sampling]`: how rollouts are drawn."""

    temperature: float = Field(
        1.0, gt=0, description="Divides the logits, in the generator and in the trainer."
    )
    max_tokens: int = Field(256, ge=1, description="The most tokens one completion may have.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a completion.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus cut; training with a cut is refused.")
    top_k: int = Field(0, ge=0, description="Top-k cut, 0 for none; training with a cut is refused.")

    @model_validator(mode="after")
    def _no_empty_stop(self) -> Self:
        if not all(self.stop):
            raise ValueError("stop: a stop string must not be empty")
        return self

    @model_validator(mode="after")
    def _no_cuts(self) -> Self:
        if self.top_p < 1 or self.top_k > 0:
            raise ValueError(
                "training with top_p or top_k is refused: log-probs are taken before the cut, so the importance "
                "ratio would be wrong; use top_p = 1 and top_k = 0 (temperature is free)"
            )
        return self


class AlgorithmConfig(Section):
    """`[algorithm]`: from rewards to a loss."""

    # With a built-in algorithm every setting that it reads has its value, the one given or its preset (presets.py), and
    # one that it does not read cannot be given. What a user's class reads is known where it is loaded.

    name: str = Field(
        "grpo",
        description="A built-in (`grpo`, `dr_grpo`, `dapo`, `gspo`, `rloo`, `reinforce`, `cispo`, `icepop`, `dsis`), "
        "or `path/to/file.py:Class` of your own. It says which of the other settings are read and presets them "
        "([algorithms](algorithms.md)); the defaults here are those of `grpo`.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of your own class's constructor."
    )
    group_size: int = Field(8, ge=1, description="Samples per task (G).")
    loss_aggregation: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="`token`: one mean over the batch's sampled tokens (DAPO); "
        "`sequence`: the mean over sequences of each sequence's token mean (GRPO); "
        "`constant`: the mean over sequences of each sequence's sum, divided by `max_length` (Dr.GRPO).",
    )
    max_length: int | None = Field(
        None,
        ge=1,
        description='L_max of `loss_aggregation = "constant"`; by default `environment.max_episode_tokens`, or else '
        "`sampling.max_tokens`.",
    )
    normalize_std: bool = Field(
        True,
        description="Divide advantages by the rewards' standard deviation; false is Dr.GRPO's advantage.",
    )
    ratio: Literal["behaviour", "proximal"] = Field(
        "behaviour",
        description="What the clipped ratio is taken against: the generator's own log-probs, or the trainer's "
        "policy at the start of the step with truncated importance weights.",
    )
    clip_low: float = Field(0.2, ge=0, lt=1, description="Lower clip range ε_low.")
    clip_high: float = Field(0.28, ge=0, description="Upper clip range ε_high (clip-higher).")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Dual clip c: where the advantage is negative the surrogate is at least c times it, so that a huge "
        "ratio does not rule the step; unset for none.",
    )
    importance_cap: float = Field(
        2.0,
        gt=0,
        description='Cap C of the truncated importance weight min(π_old/μ, C) with `ratio = "proximal"`, and with '
        "`rloo` and `reinforce`.",
    )
    ratio_band: float = Field(
        2.0, gt=1, description="β of `icepop`: tokens whose π_old/μ is outside [1/β, β] have no gradient."
    )
    kl_coef: float = Field(
        0.0, ge=0, description="Weight β of the KL term to the loaded model; 0 holds no reference."
    )
    zero_advantage: Literal["count", "replace"] = Field(
        "count",
        description="A group whose advantages are all 0, because its rewards are equal, takes one of the step's places "
        "(`count`) or is closed and another one admitted (`replace`, DAPO).",
    )
    mask_truncated: bool = Field(
        False, description="Leave completions that ran into max_tokens out of the loss and its denominator."
    )

    @property
    def file(self) -> Path | None:
        """The user's file that `name` names; None for a built-in algorithm."""
        file, separator, _ = self.name.rpartition(":")
        return Path(file) if separator and file.endswith(".py") else None

    @model_validator(mode="before")
    @classmethod
    def _with_presets(cls, data: Any) -> Any:
        name = data.get("name", "grpo") if isinstance(data, dict) else None
        if not isinstance(name, str):
            return data
        if name not in PRESETS:
            _refuse_unknown_algorithm(name)
            return data
        # An unknown setting is refused as such afterwards, with a suggestion.
        extra = [key for key in unread(name, set(data)) if key in cls.model_fields]
        if extra:
            settings = ", ".join(f"algorithm.{key}" for key in extra)
            raise ValueError(
                f"{name} does not read {settings}; remove {'it' if len(extra) == 1 else 'them'}, or choose another "
                "algorithm.name (docs/algorithms.md says what each one reads)"
            )
        return {"name": name, **PRESETS[name], **data}

    @model_validator(mode="after")
    def _group_is_a_group(self) -> Self:
        if self.group_size == 1 and self.name in PRESETS and self.name not in BATCH_SCOPE:
            raise ValueError(
                f"group_size = 1 with {self.name} gives every sample the advantage 0, so nothing would be learned; "
                "use at least 2"
            )
        return self

    @model_validator(mode="after")
    def _length_is_read(self) -> Self:
        if self.max_length is not None and self.loss_aggregation != "constant":
            raise ValueError('max_length is read with loss_aggregation = "constant" only; remove it')
        return self

    @model_serializer(mode="wrap")
    def _what_is_read(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A built-in algorithm's presets count as set; what it does not read is left out, and so can be read back."""
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


def _refuse_unknown_algorithm(name: str) -> None:
    """Raise ValueError for what is neither built in nor `path.py:Class`."""
    file, separator, attribute = name.rpartition(":")
    if separator and file.endswith(".py") and attribute:
        return
    if name.endswith((".py", ".py:")):
        raise ValueError(f"name = {name!r}: name the class too: {name.removesuffix(':')}:CLASS")
    close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"name = {name!r}: no such algorithm{hint} (use {', '.join(PRESETS)}, or path/to/file.py:Class)"
    )


class TrainerConfig(Section):
    """`[trainer]`: from a loss to new weights."""

    learning_rate: float = Field(1e-6, gt=0, description="AdamW's peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape of the learning rate after the warm-up, over the run's steps."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises linearly from 0.")
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False, description="AdamW's moment decay rates.")
    eps: float = Field(1e-8, gt=0, description="AdamW's ε.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    micro_batch_tokens: int = Field(
        1024,
        ge=1,
        description="Packed tokens per forward and backward; a larger group is split between its samples.",
    )

    @model_validator(mode="after")
    def _betas_in_range(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {list(self.betas)}")
        return self


class EngineConfig(Section):
    """`[engine]`: the generator."""

    max_sequences: int = Field(64, ge=1, le=4096, description="Sequences that decode at once.")
    context_length: int | None = Field(
        None,
        ge=2,
        description="The most tokens of one sequence, prompt included. By default the model's limit or 2048, "
        "whichever is less.",
    )
    kv_memory_mb: int | None = Field(
        None,
        ge=1,
        description="Memory for KV of running sequences; sequences are preempted to stay within it. By default "
        "what max_sequences sequences of context_length need, or half of the free memory, whichever is less.",
    )
    prefix_cache_mb: int = Field(
        256, ge=0, description="Memory for cached prompt prefixes; 0 switches the cache off."
    )
    kv_host_mb: int = Field(
        0,
        ge=0,
        description="Host memory, shared between the run's processes, for prefixes that leave the cache; 0 uses none.",
    )
    kv_disk_mb: int = Field(
        0, ge=0, description="Disk space for prefixes that leave memory, also for later runs; 0 uses none."
    )
    kv_disk_folder: str | None = Field(
        None, description="Where they lie on disk; by default in headrace's cache, shared by all runs."
    )
    kv_evict: Literal["cost", "lru"] = Field(
        "cost",
        description="What goes first when memory for prefixes is short: what saves least computation for its size "
        "and chance of reuse (`cost`), or what was not used for longest (`lru`).",
    )
    max_batch_tokens: int = Field(
        512, ge=1, description="The most tokens of one engine step; longer prompts are prefilled in chunks."
    )
    kv_on_update: Literal["recompute", "keep"] = Field(
        "recompute",
        description="What a running sequence does when weights change: prefill again under the new weights, or "
        "go on with its old KV.",
    )
    prepack: bool = Field(
        True, description="Keep linear weights in the CPU kernel's own layout while generating."
    )
    weight_format: Literal["float32", "int8"] = Field(
        "float32",
        description="Weights that generate: `float32` stands for the model's own (`model.dtype`), `int8` for quantised "
        "linear layers. Their rollouts come from a slightly different policy, which the algorithm has to correct for "
        '([which do](algorithms.md)); needs `model.dtype = "float32"` and `model.device = "cpu"`.',
    )

    @model_validator(mode="after")
    def _lower_tiers_need_the_cache(self) -> Self:
        if self.prefix_cache_mb == 0 and (self.kv_host_mb or self.kv_disk_mb):
            raise ValueError(
                "kv_host_mb and kv_disk_mb take what leaves the cache; set prefix_cache_mb above 0"
            )
        return self

    @model_validator(mode="after")
    def _int8_is_packed(self) -> Self:
        if self.weight_format == "int8" and not self.prepack:
            raise ValueError('weight_format = "int8" is a packed format; leave prepack = true')
        return self


class LineConfig(Section):
    """`[line]`: the production line."""

    groups_per_step: int = Field(8, ge=1, description="Groups per optimizer step (B).")
    steps: int = Field(100, ge=1, description="Optimizer steps of the run.")
    max_staleness: int = Field(
        1, ge=0, description="The bound η on token staleness; 0 is strictly on-policy."
    )
    seed: int = Field(0, ge=0, description="Seeds task order and sampling.")
    decode_steps: int = Field(8, ge=1, description="Engine steps of one Decode unit.")
    checkpoint_every: int = Field(
        50, ge=0, description="Steps between checkpoints; 0 writes only the last one."
    )
    keep_checkpoints: int = Field(2, ge=1, description="Checkpoints kept, the newest first.")
    wait_timeout_s: float = Field(
        600.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="A wait longer than this ends the run with an error that names what was missing.",
    )
    logprob_diff_limit: float = Field(
        0.05,
        gt=0,
        description="The run stops when the mean difference between trainer and generator log-probs under the "
        'same weights passes this; does not apply to `engine.weight_format = "int8"`.',
    )
    mismatch_ess_limit: float = Field(
        0.7,
        gt=0,
        lt=1,
        description='With `engine.weight_format = "int8"` the run stops when the effective sample size of the '
        "quantised policy's tokens for the policy that is trained, as a share (`mismatch_ess`), stays below this.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads; by default every core this process may use (or `OMP_NUM_THREADS`), and fewer while "
        "other processes use them.",
    )


class EvalConfig(Section):
    """`[eval]`: held-out reward before and after training."""

    tasks: int = Field(
        64, ge=0, description="Held-out tasks to answer greedily, at most; 0 measures nothing."
    )


class Config(Section):
    """Every setting of a run."""

    model: ModelConfig
    environment: EnvironmentConfig
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    line: LineConfig = Field(default_factory=LineConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    @model_validator(mode="after")
    def _int8_fits(self) -> Self:
        if self.engine.weight_format != "int8":
            return self
        for name, value, needed in (
            ("model.dtype", self.model.dtype, "float32"),
            ("model.device", self.model.device, "cpu"),
        ):
            if value != needed:
                raise ValueError(f'engine.weight_format = "int8" needs {name} = "{needed}", not "{value}"')
        _check_correction(self.algorithm)
        return self

    @model_validator(mode="after")
    def _length_has_a_value(self) -> Self:
        algorithm = self.algorithm
        if algorithm.loss_aggregation == "constant" and algorithm.max_length is None:
            length = self.environment.max_episode_tokens or self.sampling.max_tokens
            resolved = algorithm.model_copy(update={"max_length": length})
            object.__setattr__(self, "algorithm", resolved)
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read a TOML file, apply `a.b=c` overrides, resolve paths relative to the file's folder.

        Raises:
            ConfigError: one line that names the setting and how to mend it.
        """
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        changed = copy.deepcopy(data)
        for override in overrides:
            _apply_override(changed, override)
        try:
            return cls.from_dict(changed, base=path.parent, source=str(path))
        except ConfigError as error:
            if not overrides:
                raise
            try:
                cls.from_dict(data, base=path.parent)
            except ConfigError:
                raise error from None
            # The file is right by itself, so it is not to blame.
            raise ConfigError(f"--set: {str(error).removeprefix(f'{path}: ')}") from None

    @classmethod
    def from_dict(cls, data: dict[str, Any], base: Path | None = None, source: str = "config") -> Config:
        """Validate `data`; relative paths in it are taken relative to `base` (default: the working folder)."""
        return cls.from_resolved(_resolve_paths(data, (base or Path.cwd()).resolve()), source)

    @classmethod
    def from_resolved(cls, data: dict[str, Any], source: str = "config") -> Config:
        """What `to_dict` wrote, whose paths are absolute: nothing is looked up on the disk."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{source}: {describe(error, cls)}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data without unset optional values, ready for TOML."""
        return self.model_dump(mode="json", exclude_none=True)


def _check_correction(algorithm: AlgorithmConfig) -> None:
    """Raise ValueError unless the loss corrects for a quantised policy; a class of the user's own has to."""
    reads = PRESETS.get(algorithm.name)
    if reads is None or algorithm.name in CORRECTING:
        return
    if "ratio" not in reads:
        raise ValueError(
            f'engine.weight_format = "int8" cannot go with algorithm.name = "{algorithm.name}": the rollouts come from '
            f"the quantised policy, and its loss does not correct for it; use {', '.join(CORRECTING)}, or grpo with "
            'algorithm.ratio = "proximal"'
        )
    if algorithm.ratio != "proximal":
        raise ValueError(
            'engine.weight_format = "int8" needs algorithm.ratio = "proximal": the rollouts come from the '
            "quantised policy, and the loss must correct for it"
        )


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts) or len(parts) < 2:
        raise ConfigError(
            f"--set {override}: write section.key=value, for example trainer.learning_rate=1e-5"
        )
    try:
        value: Any = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {part!r} is a value, not a section")
    table[parts[-1]] = value


def _resolve_paths(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make relative paths absolute: of the model, the user's classes and `engine.kv_disk_folder`."""
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        name = model["name"]
        looks_like_path = name.startswith((".", "~")) or name.endswith(".gguf") or (base / name).exists()
        if looks_like_path and name not in MODEL_ALIASES:
            model["name"] = str((base / Path(name).expanduser()).resolve())
    engine = data.get("engine")
    if isinstance(engine, dict) and isinstance(engine.get("kv_disk_folder"), str):
        engine["kv_disk_folder"] = str((base / Path(engine["kv_disk_folder"]).expanduser()).resolve())
    for section in (data.get("environment"), data.get("algorithm")):
        if isinstance(section, dict) and isinstance(section.get("name"), str):
            file, separator, attribute = section["name"].rpartition(":")
            if separator and file.endswith(".py"):
                section["name"] = f"{(base / Path(file).expanduser()).resolve()}:{attribute}"
    return data


def describe(error: ValidationError, section: type[BaseModel]) -> str:
    """The first validation error of `section` as one line, with a suggestion for a misspelt key."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1], section)
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        prefix = "".join(f"{part}." for part in first["loc"][:-1])
        hint = f"did you mean {prefix + close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown setting {where!r}; {hint}"
    if first["type"] == "missing":
        return f"setting {where!r} is required"
    if first["type"] == "value_error":
        # What is wrong between sections has no place of its own.
        return f"{where}: {first['ctx']['error']}" if where else str(first["ctx"]["error"])
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where} = {first['input']!r}: {message}"


def _known_keys(location: tuple[int | str, ...], section: type[BaseModel]) -> list[str]:
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        section = annotation
    return list(section.model_fields)
