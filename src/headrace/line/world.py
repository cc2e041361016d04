"""The other side of one conversation that is going on: what was said, done and answered so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from headrace.environments import Action, WorldReply
from headrace.models import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class World:
    """A conversation, the policy's actions, and the world's replies: its first observation, then one per action."""

    conversation: Conversation
    actions: list[Action]
    replies: list[WorldReply]

    def to_dict(self) -> dict[str, Any]:
        return {
            "conversation": self.conversation.to_dict(),
            "actions": [asdict(action) for action in self.actions],
            "replies": [reply.to_dict() for reply in self.replies],
        }

    @classmethod
    def from_dict(
        cls, tokenizer: PreTrainedTokenizerBase, stop_token_ids: frozenset[int], data: dict[str, Any]
    ) -> Self:
        return cls(
            Conversation.from_dict(tokenizer, data["conversation"], stop_token_ids=stop_token_ids),
            [Action(**action) for action in data["actions"]],
            [WorldReply.from_dict(reply) for reply in data["replies"]],
        )
