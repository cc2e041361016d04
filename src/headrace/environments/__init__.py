"""Tasks and rewards: what an environment is, the built-in ones, and the processes that run them."""

from headrace.environments.base import Environment, validate_reward, validate_task
from headrace.environments.pool import EnvironmentPool, RewardReply
from headrace.environments.registry import load_environment

__all__ = [
    "Environment",
    "EnvironmentPool",
    "RewardReply",
    "load_environment",
    "validate_reward",
    "validate_task",
]
