"""An agent that was written for the client of OpenAI, and that `make demo-agent` trains. The two lines that changed for
training are marked; what the environment needs of a row of data.prompts are its columns, by their names.

    mpirun -n 4 python -m rlhf_spmd train --preset tools environment=examples/agent.py:run reward_function=
"""

import json
import operator
import re

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def tool(name, parameter, description):
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [tool("lookup", "word", "Looks a word up in the table."), tool("calculate", "expression", "Computes 3+4.")]


def called(name, arguments, table):
    if name == "lookup":
        return str(table.get(arguments["word"], "unknown"))
    first, sign, second = re.fullmatch(r"(-?\d{1,9})([-+*])(-?\d{1,9})", arguments["expression"]).groups()
    return str(OPERATIONS[sign](int(first), int(second)))


async def run(client, prompt, table, answer):  # was: async def run(prompt, table), with client = AsyncOpenAI()
    messages = list(prompt)
    while True:
        response = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = response.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            try:
                result = called(call.function.name, json.loads(call.function.arguments), table)
            except Exception as error:
                result = f"error: {type(error).__name__}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return float(message.content == answer)  # was: return message.content
