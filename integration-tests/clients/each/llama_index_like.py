"""LlamaIndex's OpenAILike: chat and complete, both also as streams, structured prediction and tools."""

import openai
import pydantic
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from rows import MODEL, QUESTIONS, TOO_LONG, URL, WEATHER_QUESTION, refused, request


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


class Place(pydantic.BaseModel):
    place: str = pydantic.Field(max_length=20)
    days: int = pydantic.Field(ge=1, le=7)


class Last(BaseEventHandler):
    """Keeps the last answer: structured prediction returns the object only, without its usage."""

    answer: object = None

    def handle(self, event, **_more):
        if isinstance(event, LLMChatEndEvent):
            self.answer = event.response


def model(**fields):
    fields = {"max_tokens": 24} | fields
    return OpenAILike(
        model=MODEL, api_base=f"{URL}/v1", api_key="none", max_retries=0, is_chat_model=True, context_window=8192,
        is_function_calling_model=True, timeout=120, **fields,
    )


def finish(row, raw):
    usage = raw["usage"] if isinstance(raw, dict) else raw.usage
    row.done(usage.prompt_tokens, usage.completion_tokens)


def follow(row, stream):
    answer = None
    for answer in stream:
        row.first()
    finish(row, answer.raw)


def plain(question):
    messages, counted = [ChatMessage(role="user", content=question)], {"stream_options": {"include_usage": True}}
    with request("chat") as row:
        finish(row, chat.chat(messages, extra_headers=row.headers).raw)
    with request("stream_chat") as row:
        follow(row, chat.stream_chat(messages, extra_headers=row.headers, **counted))
    with request("complete") as row:
        finish(row, text.complete(question, extra_headers=row.headers).raw)
    with request("stream_complete") as row:
        follow(row, text.stream_complete(question, extra_headers=row.headers, **counted))


def structured():
    for kind in ({"should_use_structured_outputs": True}, {}):
        with request(f"structured_predict{', response_format' if kind else ', tools'}") as row:
            llm, prompt = model(max_tokens=300, **kind), PromptTemplate("Invent a person.")
            row.begin()
            answer = llm.structured_predict(Person, prompt, llm_kwargs={"extra_headers": row.headers})
            finish(row, last.answer.raw)
            assert isinstance(answer, Person), answer


def tools():
    words = {"name": "weather", "description": "The weather."}
    weather = FunctionTool.from_defaults(lambda place, days: "sunny", fn_schema=Place, **words)
    llm = model(max_tokens=400)
    for _ in range(4):
        with request("chat_with_tools") as row:
            answer = llm.chat_with_tools([weather], WEATHER_QUESTION, tool_required=True, extra_headers=row.headers)
            finish(row, answer.raw)
            calls = llm.get_tool_calls_from_response(answer)
            assert calls and all(Place(**call.tool_kwargs) for call in calls)


chat, text, last = model(), model(), Last()
text.is_chat_model = False
get_dispatcher().add_event_handler(last)
for question in QUESTIONS:
    plain(question)
    structured()
tools()
with refused("too long", openai.BadRequestError, "context_length_exceeded") as row:
    chat.chat([ChatMessage(role="user", content=TOO_LONG)], extra_headers=row.headers)
