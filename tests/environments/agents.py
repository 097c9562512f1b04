"""Agents, as users have them: they keep their messages and ask the model with a client of OpenAI's form."""

import asyncio
import json
import urllib.error
import urllib.request

from tests.environments.functions import add, shout

FUNCTIONS = {"add": add, "shout": shout}


async def calls(client, prompt, tools):
    """Calls tools until the model says something without a call."""
    messages = list(prompt)
    while True:
        response = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return len(messages)
        for call in message.tool_calls:
            function = FUNCTIONS[call.function.name]
            result = function(**json.loads(call.function.arguments))
            result = await result if asyncio.iscoroutine(result) else result
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def tells(client, prompt):
    """Says in its next message what it was given."""
    asked = {"messages": list(prompt), "stream": True, "stream_options": {"include_usage": True}, "model": "m"}
    chunks = [chunk.model_dump() async for chunk in await client.chat.completions.create(**asked)]
    words = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    messages = [*prompt, {"role": "assistant", "content": words}, {"role": "user", "content": json.dumps(chunks)}]
    await client.chat.completions.create(messages=messages, model="m")
    return 1.0


async def over_http(client, prompt):
    """Asks from a thread, without a client."""

    def asked(**message):
        key = message.pop("key", client.api_key)
        request = urllib.request.Request(
            f"{client.base_url}/chat/completions",
            json.dumps(message).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    messages = list(prompt)
    assert await asyncio.to_thread(asked, messages=messages, key="guessed") == (401, client.refusal)
    status, answer = await asyncio.to_thread(asked, messages=messages)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": str(status)}]
    await asyncio.to_thread(asked, messages=messages)
    return 1.0


async def twice(client, prompt):
    """Asks two things at once."""
    one, other = ([*prompt, {"role": "user", "content": word}] for word in "ab")
    await asyncio.gather(*(client.chat.completions.create(model="m", messages=messages) for messages in (one, other)))
    return 1.0


async def warm(client, prompt):
    await client.chat.completions.create(model="m", messages=list(prompt), temperature=0.2)
    return 1.0


async def silent(client, prompt):
    return 1.0


async def forgets(client, prompt, catches):
    """Changes what was said, and goes on if it may."""
    answer = await client.chat.completions.create(model="m", messages=list(prompt))
    said = answer.choices[0].message.content
    changed = [*prompt, {"role": "assistant", "content": said + "!"}, {"role": "user", "content": "?"}]
    try:
        await client.chat.completions.create(model="m", messages=changed)
    except Exception as error:
        if not catches:
            raise
        assert error.status_code == 400 and "message 1 of the request" in error.message
    return 0.25


async def counts(client, prompt):
    """Is worth what the model said, and asks again."""
    messages, total, reason = list(prompt), 0, ""
    while reason != "length":
        answer = await client.chat.completions.create(model="m", messages=messages)
        reason = answer.choices[0].finish_reason
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
        total += answer.usage.completion_tokens
    return total


async def stubborn(client, prompt):
    """Does not look at the reason."""
    messages = list(prompt)
    while True:
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "more"}]


def blocking(client, prompt):
    return 1.0


async def lacks(client, number):
    return number
