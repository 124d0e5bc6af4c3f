"""LangChain's ChatOpenAI and OpenAI: invoke, stream, with_structured_output, bind_tools, its error for long prompts."""

import pydantic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI
from rows import MODEL, OFFERED, QUESTIONS, TOO_LONG, URL, WEATHER_QUESTION, refused, request


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


class Weather(pydantic.BaseModel):
    """The weather of a place."""

    place: str = pydantic.Field(max_length=20)
    days: int = pydantic.Field(ge=1, le=7)


def model(row, kind=ChatOpenAI, **fields):
    """A model whose requests have the row's headers; making it is not part of the row's time."""
    fields = {"max_tokens": 24} | fields
    made = kind(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, default_headers=row.headers, **fields)
    row.begin()
    return made


def finish(row, message):
    row.done(message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"])


def follow(row, stream):
    """The sum of the chunks."""
    whole = None
    for chunk in stream:
        row.first()
        whole = chunk if whole is None else whole + chunk
    finish(row, whole)
    return whole


def plain(question):
    with request("invoke") as row:
        finish(row, model(row).invoke(question))
    with request("stream") as row:
        # With an address that is not OpenAI's it asks for no usage unless told so.
        follow(row, model(row, stream_usage=True).stream(question))
    with request("completions, generate") as row:
        usage = model(row, OpenAI).generate([question]).llm_output["token_usage"]
        row.done(usage["prompt_tokens"], usage["completion_tokens"])


def structured():
    for method in ("json_schema", "function_calling"):
        with request(f"with_structured_output, {method}") as row:
            runnable = model(row, max_tokens=300).with_structured_output(
                Person, method=method, include_raw=True, strict=True
            )
            answer = runnable.invoke("Invent a person.")
            finish(row, answer["raw"])
            assert isinstance(answer["parsed"], Person), answer


def tools():
    # As OpenAI's "required", and by name.
    for choice in ("any", "Weather"):
        with request("bind_tools") as row:
            bound = model(row, max_tokens=400).bind_tools([Weather], tool_choice=choice, strict=True)
            message = bound.invoke(WEATHER_QUESTION)
            finish(row, message)
            assert message.tool_calls and all(Weather(**call["args"]) for call in message.tool_calls)
        with request("bind_tools, stream") as row:
            bound = model(row, max_tokens=400, stream_usage=True).bind_tools([Weather], tool_choice=choice, strict=True)
            whole = None
            for chunk in bound.stream(WEATHER_QUESTION):
                whole = chunk if whole is None else whole + chunk
            finish(row, whole)
            assert whole.tool_calls and all(Weather(**call["args"]) for call in whole.tool_calls)


def responses(question):
    with request("invoke, responses") as row:
        finish(row, model(row, use_responses_api=True).invoke(question))
    with request("stream, responses") as row:
        follow(row, model(row, use_responses_api=True, stream_usage=True).stream(question))


for question in QUESTIONS:
    plain(question)
    structured()
    if "/v1/responses" in OFFERED:
        responses(question)
tools()
with refused("too long", ContextOverflowError) as row:
    model(row).invoke(TOO_LONG)
