"""Agents whose episodes have several conversations."""

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

MORE = {"role": "user", "content": "7"}
OTHER = {"role": "system", "content": "8*9"}


async def said(client, messages):
    """Returns the model's message, and its words."""
    response = await client.chat.completions.create(model="policy", messages=messages)
    message = response.choices[0].message
    return message.model_dump(exclude_none=True), message.content or ""


async def asked(client, words):
    """Returns what a sub-agent, with another system prompt, says of some words."""
    _, found = await said(client, [OTHER, {"role": "user", "content": words[:4]}])
    return found


async def delegates(client, prompt, answer):
    """Lets a sub-agent look at what it says."""
    messages = list(prompt)
    for _ in range(2):
        message, words = await said(client, messages)
        found = await asked(client, words)
        with suppress(KeyError, FileNotFoundError):  # as in of_tables.py
            (Path(os.environ["DEADLY"]) / "in a call").unlink()
            os.kill(os.getppid(), signal.SIGKILL)
        messages += [message, {"role": "user", "content": found[:4]}]
    _, words = await said(client, messages)
    return worth(words, answer)


async def drops(client, prompt, answer):
    """Keeps of each earlier turn only how it ends."""
    messages, words = list(prompt), ""
    for _ in range(3):
        _, words = await said(client, messages)
        messages += [{"role": "assistant", "content": f"{words[-1:]}."}, MORE]
    return worth(words, answer)


async def gathers(client, prompt, answer):
    """Talks with itself four times at once, after pauses that differ in each run."""

    async def talk(number):
        messages = [*prompt, {"role": "user", "content": str(number // 2)}]  # two are alike
        for _ in range(2):
            await asyncio.sleep(random.Random(os.urandom(8)).random() * 0.05)
            message, words = await said(client, messages)
            messages += [message, MORE]
        return words

    return worth(max(await asyncio.gather(*map(talk, range(4)))), answer)


async def by_openai(client, prompt, answer):
    """The same with the package openai, whose requests come over the loopback."""
    import openai

    async with openai.AsyncOpenAI(max_retries=0) as own:
        return await gathers(own, prompt, answer)


async def goes_on(client, prompt, answer):
    """Asks more sub-agents than it may, and a conversation that is over; then ends its own."""
    message, words = await said(client, prompt)
    codes = []
    for messages in ([OTHER], [OTHER, {"role": "assistant", "content": answer}, MORE], [MORE], [MORE, MORE]):
        try:
            _, words = await said(client, messages)
            codes.append(words)
        except Exception as error:
            codes.append(error.code)
    await said(client, [*prompt, message, {"role": "user", "content": " ".join(codes)}])
    return 0.5


async def naps(client, prompt, answer):
    """Sleeps while the model has nothing to do."""
    await asked(client, "a")
    await asked(client, "b")
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return 1.0


async def breaks(client, prompt, answer):
    await asyncio.gather(asked(client, "a"), asked(client, "b"))
    raise OSError(answer)


def worth(words, answer):
    """Returns a number that differs between most texts."""
    return (1 + sum(map(ord, words + answer)) % 13) / 13
