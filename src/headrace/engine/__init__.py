"""The generator: tokens in, tokens out."""

from headrace.engine.engine import Engine, Output, Sample, TokenEvent
from headrace.engine.sampler import random_key

__all__ = ["Engine", "Output", "Sample", "TokenEvent", "random_key"]
