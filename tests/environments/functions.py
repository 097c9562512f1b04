"""Functions as tools, and classes of this program: with step(text), and what goes wrong."""

import asyncio
import os
import time


def add(a: float, b: float) -> float:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def shout(text: str) -> str:
    """Writes a text in capitals.

    Args:
        text: The text.
    """
    await asyncio.sleep(0.001)
    return text.upper()


def nap(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: For so long.
    """
    time.sleep(seconds)
    return "rested"


def end(after_s: float) -> str:
    """Ends its process.

    Args:
        after_s: So many seconds later.
    """
    time.sleep(after_s)
    os._exit(5)


def untyped(x):
    """Does nothing."""


def silent(x: int) -> int:
    return x


def send(text: str) -> str:
    """Sends a letter.

    Args:
        text: The letter.
    """
    return "sent"


send.once = True


TOOLS = [add, shout, nap, end]


class Rounds:
    """Counts the turns; what is said in the last one is worth its length."""

    def reset(self, rounds: int, seed: int, sample_seed: int):
        self.left, self.said, self.seeds = rounds, [], [seed, sample_seed]

    def step(self, text: str):
        if text == "break":
            raise RuntimeError("broken")
        if text == "exit":
            os._exit(3)
        self.left, self.said = self.left - 1, [*self.said, text]
        return f"{self.left} left of {self.said}", float(len(text)), self.left == 0


class Fragile(Rounds):
    """Breaks at its first step in as many objects as the file beside it says."""

    def reset(self, rounds: int, path: str):
        super().reset(rounds, 0, 0)
        self.path = path

    def step(self, text: str):
        with open(self.path, "a+", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.seek(0)
            lines = file.read().count(f"{text}\n")
        if text.startswith("fragile") and lines <= int(text[-1]):
            raise RuntimeError(f"broken {lines}")
        return super().step(text)


class Total:
    """Counts with a tool."""

    num_resets = 0

    def reset(self):
        self.total = 0

    def count(self, by: int) -> int:
        """Adds to a total.

        Args:
            by: So much.
        """
        self.total += by
        return self.total

    def get_reward(self):
        return self.total


class Broken:
    """Breaks where its row says."""

    def reset(self, at: str):
        self.at = at
        if at == "reset":
            raise RuntimeError("no reset")

    def step(self, text: str):
        return "more", float("inf") if self.at == "step is inf" else 1.0, len(text) == 1

    def get_reward(self):
        if self.at == "get_reward":
            raise RuntimeError("no reward")
        return float("nan") if self.at == "get_reward is nan" else 2.0


class SlowReward:
    """Is done at once, and thinks about what that is worth."""

    def reset(self): ...

    def step(self, text: str):
        return "", 1.0, True

    def get_reward(self):
        time.sleep(1.0)
        return 2.0


class Restless(Total):
    """Answers by the clock."""

    def count(self, by: int) -> int:
        """Adds to a total.

        Args:
            by: So much.
        """
        return time.monotonic_ns()


SEVERAL = {"rounds": Rounds, "total": Total}
