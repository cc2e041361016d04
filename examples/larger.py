"""A task of one's own: a class with `tasks` and `reward`, each of them sync or async."""

import random


class Larger:
    """Which of two numbers is larger?"""

    def tasks(self, split):
        rng = random.Random(split)
        while True:
            a, b = rng.sample(range(10, 100), 2)
            yield {"prompt": f"Which is larger, {a} or {b}? Reply with only the number.", "answer": max(a, b)}

    def reward(self, task, completion):
        return float(str(task["answer"]) == completion.strip())
