"""Tokens in, tokens out: `step()` schedules, runs and draws.

Invariants
* All tokens of one step are computed and drawn under one policy version; weights change only between steps.
* Every drawn token is reported once, with its behaviour log-prob and the version that drew it.
* KV of older weights is never used unless `kv_on_update = "keep"`, and then the tokens drawn over it say so.
* `submit` validates; a request that it accepts always ends (stop, length or abort).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import ValidationError

from headrace.config import EngineConfig, describe
from headrace.engine.forward import Prepared, make_forward
from headrace.engine.kv import UNNAMED, make_directory
from headrace.engine.runner import Runner
from headrace.engine.sampler import random_key, sample, uniform
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import EngineSequence
from headrace.engine.slots import KVSlots, bytes_per_token
from headrace.engine.text import before_stop, completion_text, stop_token_ids
from headrace.errors import NonFiniteError, UserError
from headrace.models import (
    IncrementalDetokenizer,
    LoadedModel,
    encode_prompt,
    load_model,
    resolve,
)
from headrace.models.attention import ATTENTION
from headrace.state.eviction import Kind
from headrace.types import Sampling

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]

KNOWN_PROMPTS = 4096
"""Prompts remembered; forgetting one only costs that its samples read it apart."""

DEFAULT_CONTEXT = 2048
"""Context length where neither the settings nor the model say less."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One drawn token. `finish_reason` is set on a request's last one: "stop" or "length".

    `mixed_kv` says that KV of older weights took part in the forward that drew it.
    """

    request_id: Hashable
    token_id: int
    logprob: float
    version: int
    mixed_kv: bool
    finish_reason: str | None


@dataclass(slots=True)
class Sample:
    """One completion. `token_ids` holds the stop token too; `text` excludes special tokens and stop strings."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class Output:
    """The samples of one prompt."""

    prompt_ids: list[int]
    samples: list[Sample]


class Engine:
    """Generates with one model replica.

    Args:
        model: loaded with `attn_implementation="headrace"`. The engine shares its parameters: whoever changes
            them calls `update_weights` before the next step.
        config: the generator's settings.
        weights_id: what the weights are (any string that differs when they do).
        kv_shared_name: engines of other processes with the same name share this one's `kv_host_mb`.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        weights_id: str = UNNAMED,
        *,
        kv_shared_name: str | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.model = model
        self.tokenizer = model.tokenizer
        self.version = 0
        self.context_length = context_limit(model.context_length, self.config)
        int8 = self.config.weight_format == "int8"
        self.forward = make_forward(
            model.module, prepack=self.config.prepack, int8=int8, context_length=self.context_length
        )
        self.runner = Runner(self.forward)
        kv_dtype = self.forward.kv_dtype
        self.kv_bytes_per_token = bytes_per_token(self.forward.shapes, kv_dtype)
        capacity = _capacity_tokens(self.config, self.context_length, self.kv_bytes_per_token)
        self.slots = KVSlots(
            self.forward.shapes,
            self.config.max_sequences,
            self.context_length,
            capacity,
            kv_dtype,
            model.device,
        )
        self.directory = make_directory(
            self.config, model, self.forward, self.slots, weights_id, kv_shared_name
        )
        self.cache = self.directory.cache
        self.scheduler = Scheduler(self.slots, self.directory, self.config.max_batch_tokens)
        self._prompts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._detokenizers: dict[Hashable, IncrementalDetokenizer] = {}
        self._arrivals = 0
        self.last_decoded = 0
        """Sequences that the last step advanced by one token."""
        self.last_prefilled = 0
        """Prompt tokens that the last step computed."""

    @classmethod
    def load(
        cls,
        model: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        weights_id: str = UNNAMED,
        **settings: Any,
    ) -> Engine:
        """Load a model by folder, GGUF file, alias or hub id.

        Args:
            settings: fields of the `[engine]` section, such as `max_sequences` or `context_length`.

        Raises:
            UserError: the model is missing or refused, or the settings are impossible.
        """
        try:
            config = EngineConfig(**settings)
        except ValidationError as error:
            raise UserError(f"engine settings: {describe(error, EngineConfig)}") from None
        loaded = load_model(resolve(model), dtype=dtype, device=device, attn_implementation=ATTENTION)
        return cls(loaded, config, weights_id)

    @property
    def model_path(self) -> Path:
        """The local Hugging Face folder that was loaded."""
        return self.model.path

    @property
    def weights_id(self) -> str:
        return self.directory.identity.weights_id

    @property
    def num_unfinished(self) -> int:
        """Requests that still have tokens to draw."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def submit(
        self,
        request_id: Hashable,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        random_key: int = 0,
        prompt_length: int | None = None,
        priority: tuple[int, ...] = (0,),
        keep_kv: bool = False,
    ) -> None:
        """Queue one sample.

        Args:
            token_ids: the prompt, and what was already sampled when a sample is continued.
            random_key: identifies the sample's randomness; position does the rest.
            prompt_length: leading tokens of `token_ids` that are the prompt; all of them by default.
            priority: the lower is the more urgent; equals in order of arrival.
            keep_kv: when it ends, keep the KV of prompt and sampled tokens for a prompt that goes on from
                there, until `release` or until it is the least valuable.

        Raises:
            UserError: the prompt is empty, does not fit the context or holds ids outside the vocabulary, the
                request's id is in use, or `prompt_length` is impossible.
        """
        tokens = list(token_ids)
        if self.scheduler.find(request_id) is not None:
            raise UserError(f"request {request_id!r} is already running")
        if not tokens:
            raise UserError("a prompt must have at least one token")
        check_prompt_length(len(tokens), self.context_length)
        vocabulary = self.model.vocab_size
        if not all(0 <= token < vocabulary for token in tokens):
            raise UserError(f"a prompt holds token ids outside the vocabulary of {vocabulary}")
        if prompt_length is None:
            prompt_length = len(tokens)
        if not 0 < prompt_length <= len(tokens):
            raise UserError(
                f"prompt_length must be between 1 and the {len(tokens)} tokens given, not {prompt_length}"
            )
        sequence = EngineSequence(
            request_id=request_id,
            token_ids=tokens,
            prompt=self._one_object(tuple(tokens[:prompt_length])),
            sampling=sampling,
            random_key=random_key,
            priority=priority,
            arrival=self._arrivals,
            stop_token_ids=stop_token_ids(sampling, self.model.eos_token_ids),
            keep_kv=keep_kv,
        )
        self._arrivals += 1
        if sampling.stop:
            detokenizer = self._detokenizers[request_id] = IncrementalDetokenizer(self.tokenizer)
            for token in tokens[sequence.prompt_length :]:
                sequence.generated_text += detokenizer.push(token)
        self.scheduler.add(sequence)

    def abort(self, request_id: Hashable) -> bool:
        """Stop a request; no event reports it. Returns whether it was there."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def set_priority(self, request_id: Hashable, priority: tuple[int, ...]) -> None:
        """Change how urgent a request is; unknown ones are ignored."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            sequence.priority = priority

    def step(self) -> list[TokenEvent]:
        """Advance every scheduled sequence. Returns the drawn tokens, at most one per request.

        Raises:
            NonFiniteError: the weights gave a log-prob that is not finite. No request got a token in this step,
                and the engine must not be used again.
        """
        self.directory.tick()
        plan = self.scheduler.plan()
        if plan.empty:
            if self.num_unfinished and not any(s.arriving for s in self.scheduler.running):
                raise RuntimeError("the engine has requests but nothing to run")
            self.last_decoded = self.last_prefilled = 0
            return []
        self.last_decoded = len(plan.decodes)
        self.last_prefilled = sum(tokens for _, tokens in plan.chunks)
        started = time.perf_counter()
        ready, logits = self.runner.run(plan, self.slots)
        if len(plan.chunks) == 1 and not plan.decodes:
            sequence, tokens = plan.chunks[0]
            seconds = time.perf_counter() - started
            self.directory.policy.prefilled(sequence.computed - tokens, tokens, seconds)
        # A prompt whose last piece is a single token ends in a decode.
        for sequence in (*plan.decodes, *(sequence for sequence, _ in plan.chunks)):
            self._cache_prompt(sequence)
        if not ready:
            return []
        with torch.inference_mode():
            ids, logprobs = sample(
                logits,
                [s.sampling.temperature for s in ready],
                [s.sampling.top_k for s in ready],
                [s.sampling.top_p for s in ready],
                [uniform(s.random_key, len(s.token_ids)) for s in ready],
            )
        broken = [s for s, logprob in zip(ready, logprobs, strict=True) if not math.isfinite(logprob)]
        if broken:
            raise NonFiniteError(
                f"request {broken[0].request_id}: the log-prob of token {len(broken[0].token_ids)} is not finite; "
                f"the weights of version {self.version} are broken; a lower trainer.learning_rate is the usual cure",
                [s.request_id for s in broken],
            )
        return [
            self._advance(sequence, token_id, logprob)
            for sequence, token_id, logprob in zip(ready, ids, logprobs, strict=True)
        ]

    def update_weights(self, version: int, weights_id: str, prepared: Prepared | None = None) -> None:
        """The shared parameters are now those of `version`. Repacks them and deals with KV of the old ones.

        Args:
            prepared: weights that `forward.prepare` has packed. Given, they are used from now on, and the module's
                parameters show them after `forward.show`.
        """
        if prepared is None:
            self.forward.repack()
        else:
            self.forward.switch(prepared)
        old = self.directory.identity
        self.version = version
        self.directory.identity = old._replace(weights_id=weights_id)
        if old.weights_id == weights_id:
            return
        self.directory.retire(old)
        # From the last slot on: giving up a slot in the middle would move another one's KV into it.
        for sequence in sorted(self.scheduler.running, key=lambda s: s.slot or 0, reverse=True):
            if self.config.kv_on_update == "recompute" or sequence.arriving:
                self.scheduler.preempt(sequence)
            elif sequence.computed:
                sequence.mixed = True

    def expect(self, token_ids: Sequence[int], seconds: float) -> None:
        """A session whose KV was kept is expected to go on in `seconds`; what left memory is brought near before."""
        self.directory.expect(token_ids, seconds)

    def release(self, token_ids: Sequence[int]) -> None:
        """A session whose KV was kept has ended: its KV may go first."""
        self.directory.finish(token_ids)

    def tick(self) -> None:
        """Bring a little of the KV near that is expected soon. `step` does it too; call it while nothing decodes."""
        self.directory.tick()

    def close(self) -> None:
        """Let go of shared memory and disk, where KV worth keeping is written first. No step may follow."""
        self.directory.close()

    def generate(self, prompts: Sequence[Prompt] | str, sampling: Sampling | None = None) -> list[Output]:
        """Complete every prompt.

        A sample's randomness depends on the seed, the prompt and the sample's number alone, so the same call in
        another batch or order gives the same tokens. A prompt that stands twice gets different samples.

        Args:
            prompts: raw texts, token-id lists, or chat message lists.

        Raises:
            UserError: a prompt that cannot be encoded or does not fit; nothing is generated then.
        """
        sampling = sampling or Sampling()
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sequence):
            raise UserError(f"prompts must be a list of texts, token-id lists or chats, not {prompts!r}")
        if self.num_unfinished:
            raise RuntimeError("generate() needs an idle engine: requests of submit() are still running")
        outputs = [Output(encode_prompt(self.tokenizer, prompt), []) for prompt in prompts]
        seen: Counter[tuple[int, ...]] = Counter()
        samples: dict[tuple[int, int], Sample] = {}
        try:
            for i, output in enumerate(outputs):
                content = tuple(output.prompt_ids)
                for j in range(sampling.n):
                    key = random_key(sampling.seed, repr(content), seen[content], j)
                    self.submit((i, j), output.prompt_ids, sampling, random_key=key)
                    samples[i, j] = Sample()
                    output.samples.append(samples[i, j])
                seen[content] += 1
            while self.num_unfinished:
                for event in self.step():
                    _append(samples[event.request_id], event)  # type: ignore[index]
        except BaseException:
            for request_id in samples:
                self.abort(request_id)
            raise
        for item in samples.values():
            item.text = completion_text(
                self.tokenizer, item.token_ids, item.finish_reason, sampling, self.model.eos_token_ids
            )
        return outputs

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[str]:
        """Yield one completion's text as it grows; special tokens and stop strings are left out.

        Put together it is the text of `generate`'s first sample. Nothing runs before the first piece is asked for.
        """
        sampling = sampling or Sampling()
        if self.num_unfinished:
            raise RuntimeError("stream() needs an idle engine: other requests are running")
        ids = encode_prompt(self.tokenizer, prompt)
        request_id = object()
        key = random_key(sampling.seed, repr(tuple(ids)), 0, 0)
        self.submit(request_id, ids, sampling, random_key=key)
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        # Text that could be the beginning of a stop string is held back until it is clear that it is not.
        held = ""
        longest = max((len(stop) for stop in sampling.stop), default=1)
        ends = stop_token_ids(sampling, self.model.eos_token_ids)
        try:
            finished = False
            while not finished:
                for event in self.step():
                    if event.request_id is not request_id:
                        raise RuntimeError("stream() needs an idle engine: other requests are running")
                    finished = event.finish_reason is not None
                    if event.finish_reason != "stop" or event.token_id not in ends:
                        held += detokenizer.push(event.token_id)
                if finished:
                    held = before_stop(held + detokenizer.finish(), sampling.stop)
                    safe = len(held)
                else:
                    safe = len(held) - longest + 1
                if safe > 0:
                    yield held[:safe]
                    held = held[safe:]
        finally:
            self.abort(request_id)

    def _one_object(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Equal prompts as one object, so that comparing them costs nothing."""
        if len(self._prompts) >= KNOWN_PROMPTS:
            self._prompts.clear()
        return self._prompts.setdefault(prompt, prompt)

    def _advance(self, sequence: EngineSequence, token_id: int, logprob: float) -> TokenEvent:
        sequence.token_ids.append(token_id)
        finish_reason: str | None = None
        if token_id in sequence.stop_token_ids or self._met_stop_string(sequence, token_id):
            finish_reason = "stop"
        elif (
            sequence.num_sampled >= sequence.sampling.max_tokens
            or len(sequence.token_ids) >= self.context_length
        ):
            finish_reason = "length"
        event = TokenEvent(
            sequence.request_id, token_id, logprob, self.version, sequence.mixed, finish_reason
        )
        if finish_reason is not None:
            if sequence.keep_kv and not sequence.mixed:
                self._keep(sequence, sequence.computed, Kind.WAITING)
            self._remove(sequence)
        return event

    def _met_stop_string(self, sequence: EngineSequence, token_id: int) -> bool:
        detokenizer = self._detokenizers.get(sequence.request_id)
        if detokenizer is None:
            return False
        sequence.generated_text += detokenizer.push(token_id)
        return any(stop in sequence.generated_text for stop in sequence.sampling.stop)

    def _cache_prompt(self, sequence: EngineSequence) -> None:
        if sequence.prompt_cached or sequence.mixed or sequence.computed < sequence.prompt_length:
            return
        sequence.prompt_cached = True
        kind = Kind.WAITING if sequence.continues else Kind.SHARED
        self._keep(sequence, sequence.prompt_length, kind)

    def _keep(self, sequence: EngineSequence, length: int, kind: Kind) -> None:
        slot = sequence.slot
        assert slot is not None
        self.directory.insert(
            sequence.token_ids[:length], lambda start, stop: self.slots.read(slot, start, stop), kind
        )

    def _remove(self, sequence: EngineSequence) -> None:
        self.scheduler.remove(sequence)
        self._detokenizers.pop(sequence.request_id, None)


def _append(item: Sample, event: TokenEvent) -> None:
    item.token_ids.append(event.token_id)
    item.logprobs.append(event.logprob)
    item.versions.append(event.version)
    item.finish_reason = event.finish_reason


def context_limit(model_limit: int, config: EngineConfig) -> int:
    """The most tokens of one sequence, for a model made for `model_limit`.

    Raises:
        UserError: the settings ask for more than the model can do.
    """
    if config.context_length is None:
        return min(model_limit, DEFAULT_CONTEXT)
    if config.context_length > model_limit:
        raise UserError(
            f"engine.context_length = {config.context_length} is more than the model's {model_limit}"
        )
    return config.context_length


def check_prompt_length(tokens: int, context_length: int) -> None:
    """Raise a `UserError` unless a prompt leaves room for an answer."""
    if tokens >= context_length:
        raise UserError(
            f"a prompt of {tokens} tokens does not leave room for an answer in a context of {context_length}; "
            "shorten the prompt or raise engine.context_length"
        )


def _capacity_tokens(config: EngineConfig, context_length: int, token_bytes: int) -> int:
    """Tokens of KV that the running sequences may hold together.

    Raises:
        UserError: less memory is free than the settings ask for, or one sequence needs.
    """
    available = psutil.virtual_memory().available
    wanted = config.max_sequences * context_length
    if config.kv_memory_mb is not None:
        allowed = config.kv_memory_mb * 2**20
        if allowed > available:
            raise UserError(
                f"too little memory for KV: engine.kv_memory_mb = {config.kv_memory_mb}, {_mb(available)} are free; "
                "lower it, or leave it out to use half of what is free"
            )
    elif config.context_length is not None and wanted * token_bytes > available:
        raise UserError(
            f"too little memory for KV: {config.max_sequences} sequences of {context_length} tokens take "
            f"{_mb(wanted * token_bytes)}, {_mb(available)} are free; lower engine.max_sequences or "
            "engine.context_length, or set engine.kv_memory_mb, within which sequences take turns"
        )
    else:
        allowed = available // 2 if config.context_length is None else available
    if context_length * token_bytes > allowed:
        raise UserError(
            f"too little memory for KV: one sequence of {context_length} tokens takes "
            f"{_mb(context_length * token_bytes)}, {_mb(allowed)} are allowed; lower engine.context_length or raise "
            "engine.kv_memory_mb"
        )
    return min(wanted, allowed // token_bytes)


def _mb(count: int) -> str:
    return f"{count / 2**20:,.0f} MB"
