"""Verifiers that turn a completion into a verdict, in plain Python."""

from headrace.rewards.verifiers import exact_match, last_integer

__all__ = ["exact_match", "last_integer"]
