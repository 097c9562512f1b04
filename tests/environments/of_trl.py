"""As TRL's environment_factory takes it: reset(**columns), tools as public methods, get_reward()."""

import random


class Guess:
    """A number between 1 and 20 is to be found."""

    def __init__(self):
        self.tries = 0
        self.found = False

    def reset(self, answer: int | None = None, seed: int = 0, **kwargs) -> str | None:
        self.answer = answer or random.Random(seed).randrange(1, 21)
        self.tries, self.found = 0, False
        return " Begin."

    def guess(self, number: int) -> str:
        """Says whether a number is too high, too low or right.

        Args:
            number: The number that you guess.

        Returns:
            The answer.
        """
        self.tries += 1
        if not 1 <= number <= 20:
            raise ValueError(f"{number} is not between 1 and 20")
        self.found = self.found or number == self.answer
        return "right" if number == self.answer else "too high" if number > self.answer else "too low"

    async def give_up(self) -> dict:
        """Tells the number."""
        return {"number": self.answer}

    def get_reward(self) -> float:
        return 1.0 / self.tries if self.found else 0.0

    def _hidden(self) -> None: ...
