"""The generator: tokens in, tokens out."""

from headrace.engine.engine import DEFAULT_CONTEXT, Engine, Output, Sample, TokenEvent
from headrace.engine.sampler import random_key

__all__ = ["DEFAULT_CONTEXT", "Engine", "Output", "Sample", "TokenEvent", "random_key"]
