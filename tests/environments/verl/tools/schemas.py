"""The schemas of tools of verl."""

from typing import Any

from pydantic import BaseModel


class OpenAIFunctionSchema(BaseModel):
    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
