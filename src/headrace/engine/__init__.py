"""The generator: tokens in, tokens out."""

from headrace.engine.engine import Engine, Output, Sample, TokenEvent, check_prompt_length, context_limit
from headrace.engine.sampler import random_key

__all__ = ["Engine", "Output", "Sample", "TokenEvent", "check_prompt_length", "context_limit", "random_key"]
