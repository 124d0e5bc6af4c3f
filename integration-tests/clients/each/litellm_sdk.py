"""LiteLLM's SDK: completion, text_completion, streams, response_format, tools, its error for long prompts."""

import json
import os

# Else it asks GitHub for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402
import pydantic  # noqa: E402
from rows import MODEL, OFFERED, QUESTIONS, TOO_LONG, URL, WEATHER, WEATHER_QUESTION  # noqa: E402
from rows import refused, request, user  # noqa: E402

AT = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
COUNTED = {"stream": True, "stream_options": {"include_usage": True}}
# Its two names for a server with OpenAI's API.
PROVIDERS = ("hosted_vllm", "openai")


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


def finish(row, answer):
    row.done(answer.usage.prompt_tokens, answer.usage.completion_tokens)


def follow(row, stream):
    usage = None
    for chunk in stream:
        row.first()
        usage = getattr(chunk, "usage", None) or usage
    row.done(usage.prompt_tokens, usage.completion_tokens)


def plain(provider, question):
    ask = {"model": f"{provider}/{MODEL}", "messages": user(question), "max_tokens": 24, **AT}
    with request(f"completion, {provider}") as row:
        finish(row, litellm.completion(extra_headers=row.headers, **ask))
    with request(f"completion, stream, {provider}") as row:
        follow(row, litellm.completion(extra_headers=row.headers, **ask, **COUNTED))


def text(question):
    ask = {"model": f"text-completion-openai/{MODEL}", "prompt": question, "max_tokens": 24, **AT}
    with request("text_completion") as row:
        finish(row, litellm.text_completion(extra_headers=row.headers, **ask))
    with request("text_completion, stream") as row:
        follow(row, litellm.text_completion(extra_headers=row.headers, **ask, **COUNTED))


def structured(provider):
    with request(f"response_format, {provider}") as row:
        answer = litellm.completion(
            model=f"{provider}/{MODEL}", messages=user("Invent a person."), response_format=Person, max_tokens=300,
            extra_headers=row.headers, **AT,
        )
        finish(row, answer)
        Person.model_validate_json(answer.choices[0].message.content)


def tools(provider):
    # For hosted_vllm LiteLLM takes `additionalProperties` out of the schema. A sampled call could then have more fields than there are tokens.
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        with request(f"tools, {provider}") as row:
            answer = litellm.completion(
                model=f"{provider}/{MODEL}", messages=user(WEATHER_QUESTION), tools=[WEATHER], tool_choice=choice,
                temperature=0, max_tokens=400, extra_headers=row.headers, **AT,
            )
            finish(row, answer)
            calls = answer.choices[0].message.tool_calls
            assert calls and all(1 <= json.loads(call.function.arguments)["days"] <= 7 for call in calls)


def responses(question):
    with request("responses") as row:
        ask = {"model": f"openai/{MODEL}", "input": question, "max_output_tokens": 24}
        answer = litellm.responses(extra_headers=row.headers, **ask, **AT)
        row.done(answer.usage.input_tokens, answer.usage.output_tokens)


for question in QUESTIONS:
    text(question)
    if "/v1/responses" in OFFERED:
        responses(question)
for provider in PROVIDERS:
    for question in QUESTIONS:
        plain(provider, question)
    structured(provider)
    tools(provider)
    with refused(f"too long, {provider}", litellm.ContextWindowExceededError) as row:
        litellm.completion(model=f"{provider}/{MODEL}", messages=user(TOO_LONG), extra_headers=row.headers, **AT)
