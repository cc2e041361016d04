"""A task of one's own: a class with `tasks` and `reward`, each of them sync or async."""

import random
import re


class Larger:
    """Which of two numbers is larger?"""

    def tasks(self, split):
        rng = random.Random(split)
        while True:
            a, b = rng.sample(range(10, 100), 2)
            yield {"prompt": f"Which is larger, {a} or {b}? Reply with only the number.", "answer": max(a, b)}

    def reward(self, task, completion):
        if completion.strip() == str(task["answer"]):
            return 1.0
        # Something for the right number among other words: a model that never gets anything learns nothing.
        return 0.3 * (re.findall(r"\d+", completion)[:1] == [str(task["answer"])])
