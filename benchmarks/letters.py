"""A task at which an untrained model earns something, and not always the same."""


class Letters:
    """Any prompt; the reward is the share of ASCII letters."""

    def tasks(self, split):
        return [{"prompt": f"{split} {number}"} for number in range(100)]

    def reward(self, task, completion):
        return sum(c.isascii() and c.isalpha() for c in completion) / max(1, len(completion))
