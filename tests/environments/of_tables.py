"""The environment of the preset `tools` with what real ones have: it answers at random times, and breaks; and it
ends its rank where a test says so.

A test makes the file DEADLY/PLACE: the first process that comes to this place removes it, and kills its rank.
"""

import asyncio
import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_spmd.embedded.table_tools import Table
from rlhf_spmd.rewards import exact_answer

AsyncOpenAI: Any = None
with suppress(ImportError):
    from openai import AsyncOpenAI

LONGEST_S = 0.03
SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {part: {}}}}}
    for name, part in (("lookup", "word"), ("calculate", "expression"))
]


def deadly(place: str, rank: int, after_s: float = 0.0) -> None:
    """Kills a process, if a test wants that here."""
    try:
        (Path(os.environ["DEADLY"]) / place).unlink()
    except (KeyError, FileNotFoundError):
        return
    threading.Timer(after_s, os.kill, (rank, signal.SIGKILL)).start()
    if not after_s:
        time.sleep(60)


class Sleepy(Table):
    """Answers at random times, which nothing may depend on."""

    def reset(self, table: dict[str, int]) -> None:
        deadly("before a call", os.getppid())
        super().reset(table)

    def lookup(self, word: str) -> str:
        """Looks a word up in the table.

        Args:
            word: The word.

        Returns:
            Its number, or that the table has no such word.
        """
        time.sleep(LONGEST_S * random.random())
        return super().lookup(word)

    def calculate(self, expression: str) -> str:
        """Computes a sum, a difference or a product of two whole numbers.

        Args:
            expression: Two numbers with +, - or * between them.

        Returns:
            The result.
        """
        time.sleep(LONGEST_S * random.random())
        deadly("in a call", os.getppid())  # of an episode that has answers
        return super().calculate(expression)

    def close(self) -> None:
        deadly("after an answer", os.getppid())


class Breaking(Sleepy):
    """Cannot begin with some tables, whatever is tried."""

    def reset(self, table: dict[str, int]) -> None:
        super().reset(table)
        if sum(table.values()) % 4 == 0:
            raise OSError("the table cannot be read")


def judge(prompts: list[str], responses: list[str], answer: list[str]) -> list[float | None]:
    """Scores as exact_answer, in a rank that trains a moment later."""
    deadly("in training", os.getpid(), after_s=0.1)
    return exact_answer(prompts, responses, answer)


async def agent(client, prompt, table):
    """Uses such an environment by a client of its own, if OpenAI's package is there."""
    tools, messages = Sleepy(), list(prompt)
    client = AsyncOpenAI() if AsyncOpenAI else client
    tools.reset(table)
    while True:
        response = await client.chat.completions.create(model="m", messages=messages, tools=SCHEMAS)
        message = response.choices[0].message
        if not message.tool_calls:
            tools.close()
            return 0.0
        messages.append(message)
        for call in message.tool_calls:
            try:
                function = getattr(tools, call.function.name)
                result = await asyncio.to_thread(function, **json.loads(call.function.arguments))
            except Exception as error:
                result = f"error: {type(error).__name__}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
