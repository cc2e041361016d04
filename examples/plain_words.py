"""A task whose answers are a few dozen tokens long, and whose reward is a matter of degree."""

import random
import re

TOPICS = (
    "rain snow bread trees rivers sea moon clouds birds horses bridges trains clocks music sleep friends gardens "
    "winter summer honey salt gold glass paper wool fire wind stars mountains islands forests deserts farms markets "
    "schools libraries kitchens football chess dancing painting singing swimming cooking sailing"
).split()


class PlainWords:
    """Tell about something in about `words` words of at most `letters` letters."""

    def __init__(self, words=25, letters=5):
        self.words, self.letters = words, letters

    def tasks(self, split):
        topics = [t for i, t in enumerate(TOPICS) if (i % 5 == 0) == (split == "test")]
        rng = random.Random(split)
        while True:
            yield {"prompt": f"Tell me about {rng.choice(topics)} in about {self.words} short, plain words."}

    def reward(self, task, completion):
        """The share of short words, times how near the number of words is to the wanted one."""
        words = re.findall(r"[A-Za-z']+", completion)
        if not words:
            return 0.0
        short = sum(len(word) <= self.letters for word in words) / len(words)
        return short * min(len(words), self.words) / max(len(words), self.words)
