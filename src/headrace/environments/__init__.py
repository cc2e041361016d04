"""Tasks, rewards and worlds: what an environment is, the built-in ones, and the processes that run them."""

from headrace.environments.base import Action, ConversationEnvironment, Environment, Observation, Step
from headrace.environments.pool import EnvironmentPool
from headrace.environments.registry import load_environment
from headrace.environments.reply import WorldReply
from headrace.environments.validation import episode_reward, validate_reward, validate_task

__all__ = [
    "Action",
    "ConversationEnvironment",
    "Environment",
    "EnvironmentPool",
    "Observation",
    "Step",
    "WorldReply",
    "episode_reward",
    "load_environment",
    "validate_reward",
    "validate_task",
]
