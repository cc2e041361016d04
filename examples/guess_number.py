"""A game of several turns: the policy guesses a number, the world says whether it is higher or lower."""

import random
import re

WIDTH = 7
"""Numbers that it may be."""


class GuessNumber:
    """Guess a whole number within a few turns. Each guess that fits everything said so far earns something.

    Args:
        turns: guesses allowed.
    """

    def __init__(self, turns=3):
        self.turns = turns

    def tasks(self, split):
        rng = random.Random(split)
        while True:
            low = rng.randrange(1, 90)
            # Every fifth range is held out.
            if (low % 5 == 0) == (split == "test"):
                yield {"low": low, "high": low + WIDTH - 1, "number": low + rng.randrange(WIDTH)}

    def reset(self, task):
        self.number, self.low, self.high, self.turn = task["number"], task["low"], task["high"], 0
        return f"Guess my number. It is from {self.low} to {self.high}. Reply with only a number."

    def step(self, action):
        self.turn += 1
        found = re.findall(r"\d+", action.text)
        if not found:
            return self.answer("Reply with only a number.", 0.0)
        # Part of it for a number among other words: a model that never gets anything learns nothing.
        worth = 1.0 if action.text.strip(" .\n") == found[0] else 0.3
        guess = int(found[0])
        if guess == self.number:
            # The sooner, the better: it may not be worth more to go on guessing.
            return {"reward": worth * (1.0 + 0.1 * (self.turns - self.turn)), "done": True}
        fits = self.low <= guess <= self.high
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return self.answer(f"It is from {self.low} to {self.high}.", 0.1 * worth * fits)

    def answer(self, text, reward):
        messages = [{"role": "user", "content": text}]
        return {"observation": messages, "reward": reward, "done": self.turn == self.turns}
