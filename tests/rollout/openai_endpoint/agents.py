"""Agents for the tests, written as somebody would who has never heard of vime."""

from __future__ import annotations

from typing import Any

import openai


async def adder(task: Any) -> float:
    """Lets the model call a tool, and says how well it did."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        while True:
            answer = await client.chat.completions.create(model=task.model, messages=messages, tools=[tool])
            message = answer.choices[0].message
            if not message.tool_calls:
                return float(message.content == task.label)
            messages.append(message)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": task["model"], "messages": [{"role": "user", "content": task["prompt"]}]}).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
print("thinking ...")
print(json.dumps({"reward": float(said == task["label"]), "metadata": {"said": said}}))
"""
"""A program with nothing but the standard library."""
