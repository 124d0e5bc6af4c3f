"""The official OpenAI client in Python: chats, completions, `.parse()`, tools, streams, a typed error, responses."""

import json

import openai
import pydantic
from rows import MODEL, OFFERED, QUESTIONS, TOO_LONG, URL, WEATHER, WEATHER_QUESTION, refused, request, user

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
NAMED = {"type": "function", "function": {"name": "weather"}}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


def finish(row, answer):
    row.done(answer.usage.prompt_tokens, answer.usage.completion_tokens)


def follow(row, stream):
    """The chunks of a stream; the last one has the usage."""
    chunks = []
    for chunk in stream:
        row.first()
        chunks.append(chunk)
    finish(row, chunks[-1])
    return chunks


def plain(question):
    ask = {"model": MODEL, "max_tokens": 24}
    messages, counted = user(question), {"stream": True, "stream_options": {"include_usage": True}}
    with request("chat") as row:
        finish(row, client.chat.completions.create(messages=messages, extra_headers=row.headers, **ask))
    with request("chat, stream") as row:
        follow(row, client.chat.completions.create(messages=messages, extra_headers=row.headers, **ask, **counted))
    with request("completion") as row:
        finish(row, client.completions.create(prompt=question, extra_headers=row.headers, **ask))
    with request("completion, stream") as row:
        follow(row, client.completions.create(prompt=question, extra_headers=row.headers, **ask, **counted))


def structured():
    ask = {"model": MODEL, "max_tokens": 300, "messages": user("Invent a person."), "response_format": Person}
    with request("parse()") as row:
        answer = client.chat.completions.parse(extra_headers=row.headers, **ask)
        finish(row, answer)
        assert isinstance(answer.choices[0].message.parsed, Person)
    with request("stream() of a model") as row:
        options = {"include_usage": True}
        with client.chat.completions.stream(extra_headers=row.headers, stream_options=options, **ask) as stream:
            for _event in stream:
                row.first()
            answer = stream.get_final_completion()
        finish(row, answer)
        assert isinstance(answer.choices[0].message.parsed, Person)


def tools(choice):
    ask = {"model": MODEL, "max_tokens": 400, "messages": user(WEATHER_QUESTION), "tools": [WEATHER]}
    ask["tool_choice"] = choice
    with request("tools") as row:
        answer = client.chat.completions.create(extra_headers=row.headers, **ask)
        finish(row, answer)
        for call in answer.choices[0].message.tool_calls:
            assert 1 <= json.loads(call.function.arguments)["days"] <= 7
    with request("tools, stream") as row:
        ask |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(extra_headers=row.headers, **ask))
        finish(row, chunks[-1])
        calls = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or []]
        assert calls and calls[0].function.name == "weather"


def responses(question):
    ask = {"model": MODEL, "max_output_tokens": 60}

    def done(row, answer):
        row.done(answer.usage.input_tokens, answer.usage.output_tokens)

    with request("response") as row:
        done(row, client.responses.create(input=question, extra_headers=row.headers, **ask))
    with request("response, stream") as row:
        for event in client.responses.create(input=question, stream=True, extra_headers=row.headers, **ask):
            if event.type == "response.output_text.delta":
                row.first()
        done(row, event.response)
    with request("responses.parse()") as row:
        answer = client.responses.parse(input="Invent a person.", text_format=Person, extra_headers=row.headers, **ask)
        done(row, answer)
        assert isinstance(answer.output_parsed, Person)


for question in QUESTIONS:
    plain(question)
    structured()
    if "/v1/responses" in OFFERED:
        responses(question)
for choice in ["required", NAMED]:
    tools(choice)
with refused("too long", openai.BadRequestError, "context_length_exceeded") as row:
    client.chat.completions.create(model=MODEL, messages=user(TOO_LONG), extra_headers=row.headers)
