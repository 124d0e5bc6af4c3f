"""The official OpenAI client against a running cluster: what a user's program does, and what it gets wrong."""

import asyncio
import json
import math
import time
import urllib.error
import urllib.request

import openai
import pydantic
import pytest
from schemas import SCHEMAS
from structured_outputs import ask as ask_by_schema

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
STORY = [{"role": "user", "content": "Tell me a story about a lighthouse."}]


@pytest.fixture(scope="module")
def chat(client, model):
    def ask(**fields):
        return client.chat.completions.create(**({"model": model, "messages": CAPITAL, "max_tokens": 32} | fields))

    return ask


@pytest.fixture(scope="module")
def complete(client, model):
    def ask(**fields):
        return client.completions.create(**({"model": model, "prompt": "The capital of France is"} | fields))

    return ask


def text_of(stream):
    chunks = list(stream)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


# ---- answers ----------------------------------------------------------------------------------------------------


def test_models(client, model):
    served = client.models.retrieve(model)
    assert (served.id, served.object, served.owned_by) == (model, "model", "baton")
    assert served.root and "/" not in served.root and served.max_model_len > 0
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_chat(chat, model):
    answer = chat(temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert (answer.object, answer.model, answer.choices[0].message.role) == ("chat.completion", model, "assistant")
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.prompt_tokens > 10 and usage.completion_tokens > 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_chat_stream_says_the_same(chat):
    whole = chat(temperature=0)
    text, chunks = text_of(chat(temperature=0, stream=True, stream_options={"include_usage": True}))
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    # One event per token, the end token's too; the reason rides on the last.
    tokens = chunks[:-1]
    assert len(tokens) == whole.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None] * (len(tokens) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1


def test_a_response_says_what_the_chat_says(client, model, chat):
    said = chat(temperature=0).choices[0].message.content
    answer = client.responses.create(model=model, input=CAPITAL, temperature=0, max_output_tokens=32)
    assert (answer.status, answer.output_text) == ("completed", said)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    with client.responses.stream(model=model, input=CAPITAL, temperature=0, max_output_tokens=32) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == said
    # One event per token, the end token's too.
    assert kinds.count("response.output_text.delta") == answer.usage.output_tokens
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_a_response_is_parsed_and_calls(client, model):
    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        capital: bool

    parsed = client.responses.parse(model=model, input="Paris, as JSON:", text_format=City, temperature=0, max_output_tokens=64)
    assert isinstance(parsed.output_parsed, City)
    place = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"], "additionalProperties": False}
    tools = [{"type": "function", "name": "weather", "description": "Weather of a city", "parameters": place, "strict": True}]
    asked = [{"role": "user", "content": "How is the weather in Paris?"}]
    fields = {"model": model, "tools": tools, "temperature": 0, "max_output_tokens": 64}
    called = client.responses.create(input=asked, tool_choice={"type": "function", "name": "weather"}, **fields)
    [call] = called.output
    assert (call.type, call.name, list(json.loads(call.arguments))) == ("function_call", "weather", ["city"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    answer = client.responses.create(input=[*asked, call.model_dump(), result], tool_choice="none", **fields)
    assert answer.output_text and answer.output[0].type == "message"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=model, input="hi", previous_response_id=called.id)


def test_stream_without_usage(chat):
    _, chunks = text_of(chat(temperature=0, stream=True))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


def test_continuous_usage(chat):
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = text_of(chat(temperature=0, stream=True, stream_options=options, max_tokens=5))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5, 5]


def test_completions(complete):
    answer = complete(temperature=0, max_tokens=8)
    assert answer.object == "text_completion" and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    streamed = list(complete(temperature=0, max_tokens=8, stream=True))
    assert len(streamed) == 8
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    assert complete(temperature=0).usage.completion_tokens <= 16, "the default budget"


def test_prompt_forms(complete, cluster, model):
    tokens = tokenize(cluster, model, "The capital of France is")
    from_text = complete(temperature=0, max_tokens=6).choices[0].text
    assert complete(prompt=tokens, temperature=0, max_tokens=6).choices[0].text == from_text
    several = complete(prompt=["The capital of France is", "One, two, three,"], temperature=0, max_tokens=6, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == from_text
    assert several.choices[2].text == several.choices[3].text != from_text
    lists = complete(prompt=[tokens, tokens[:3]], temperature=0, max_tokens=6)
    assert lists.choices[0].text == from_text and len(lists.choices) == 2


def tokenize(cluster, model, prompt):
    return post_json(cluster, "/tokenize", {"model": model, "prompt": prompt})["tokens"]


def post_json(cluster, path, body):
    import json

    request = urllib.request.Request(cluster.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_tokenize_and_back(cluster, model):
    for text in ["Hello, world!", "où est le café ? 🦀 日本語"]:
        tokens = tokenize(cluster, model, text)
        assert post_json(cluster, "/detokenize", {"model": model, "tokens": tokens})["prompt"] == text


def test_unicode_survives_streaming(chat):
    ask = [{"role": "user", "content": "Repeat exactly: 🦀 é 日本語 🌍🌍"}]
    fields = {"messages": ask, "temperature": 0, "max_tokens": 40}
    text, _ = text_of(chat(stream=True, **fields))
    assert text == chat(**fields).choices[0].message.content


# ---- fields -----------------------------------------------------------------------------------------------------


def test_chat_logprobs(chat):
    answer = chat(temperature=0, logprobs=True, top_logprobs=3, max_tokens=8)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
        assert abs(token.top_logprobs[0].logprob - token.logprob) < 1e-5
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.0001
    assert bytes(b for token in content for b in token.bytes or []).decode() == answer.choices[0].message.content
    _, chunks = text_of(chat(temperature=0, logprobs=True, top_logprobs=3, max_tokens=8, stream=True))
    streamed = [chunk.choices[0].logprobs.content[0] for chunk in chunks]
    assert [token.token for token in streamed] == [token.token for token in content]


def test_completion_logprobs_and_echo(complete):
    answer = complete(temperature=0, max_tokens=4, logprobs=2, echo=True)
    lists = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("The capital of France is")
    total = answer.usage.prompt_tokens + 4
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset) == total
    assert lists.token_logprobs[0] is None and all(logprob <= 0 for logprob in lists.token_logprobs[1:])
    for token, offset in zip(lists.tokens, lists.text_offset):
        assert answer.choices[0].text[offset:].startswith(token)
    # The prompt's logprobs alone, nothing generated.
    scored = complete(max_tokens=0, logprobs=2, echo=True)
    assert scored.choices[0].text == "The capital of France is" and scored.usage.completion_tokens == 0
    prompt_tokens = answer.usage.prompt_tokens
    for a, b in zip(scored.choices[0].logprobs.token_logprobs[1:], lists.token_logprobs[1:prompt_tokens]):
        assert abs(a - b) < 1e-4


def test_stop_strings(chat):
    fields = {"messages": STORY, "temperature": 0, "max_tokens": 60}
    whole = chat(**fields)
    text = whole.choices[0].message.content
    # From the middle of the answer, over token borders, with a decoy that never comes.
    stop = text[len(text) // 2 : len(text) // 2 + 9]
    cut = chat(stop=[stop, "never said by anyone"], **fields)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens
    streamed, chunks = text_of(chat(stop=stop, stream=True, **fields))
    assert streamed == cut.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_three_choices(chat):
    answer = chat(messages=STORY, n=3, temperature=1, seed=11, max_tokens=24)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage.completion_tokens <= 72
    texts = ["", "", ""]
    for chunk in chat(messages=STORY, n=3, temperature=1, seed=11, max_tokens=24, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_a_seed_repeats(chat):
    def say(seed):
        return chat(messages=STORY, temperature=1, seed=seed, max_tokens=24).choices[0].message.content

    assert say(5) == say(5)
    assert say(5) != say(6)
    assert say(None) != say(None)


def test_sampling_fields_are_taken(chat):
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 6, "ignore_eos": True}
    answer = chat(
        temperature=0.7, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, seed=1, max_tokens=40, user="tester",
        extra_body=extra,
    )
    assert answer.usage.completion_tokens == 40 and answer.choices[0].finish_reason == "length"
    assert chat(temperature=0, max_completion_tokens=3, max_tokens=None).usage.completion_tokens == 3


def test_logit_bias_forbids_and_forces(complete, cluster, model):
    word = tokenize(cluster, model, " Paris")[0]
    forced = complete(temperature=0, max_tokens=3, logit_bias={str(word): 100})
    assert forced.choices[0].text == " Paris Paris Paris"
    free = complete(temperature=0, max_tokens=1, extra_body={"return_token_ids": True})
    first = free.choices[0].token_ids[0]
    banned = complete(temperature=0, max_tokens=1, logit_bias={str(first): -100}, extra_body={"return_token_ids": True})
    assert banned.choices[0].token_ids[0] != first


def test_stop_token_ids(complete):
    ids = complete(temperature=0, max_tokens=6, extra_body={"return_token_ids": True}).choices[0].token_ids
    stop_at = next(i for i in range(1, 6) if ids[i] not in ids[:i])
    extra = {"stop_token_ids": [ids[stop_at]], "return_token_ids": True}
    stopped = complete(temperature=0, max_tokens=6, extra_body=extra)
    assert stopped.choices[0].token_ids == ids[: stop_at + 1]
    assert stopped.choices[0].finish_reason == "stop"


def test_metrics_and_headers(client, model):
    raw = client.with_options(default_headers={"x-request-id": "from-the-test"}).chat.completions.with_raw_response
    answer = raw.create(model=model, messages=CAPITAL, temperature=0, max_tokens=8, extra_body={"include_metrics": True})
    assert answer.headers["x-request-id"] == "from-the-test"
    for header in ("traceparent", "openai-processing-ms", "x-queue-ms", "server-timing"):
        assert answer.headers[header]
    metrics = answer.parse().metrics
    assert metrics["ttft_ms"] > 0 and metrics["attempts"] >= 1 and metrics["decode_node"]
    assert metrics["prefill_node"] or metrics["local_prefill"]


def test_many_streams_at_once(cluster, model, chat):
    alone = chat(temperature=0).choices[0].message.content

    async def one(client):
        stream = await client.chat.completions.create(
            model=model, messages=CAPITAL, temperature=0, max_tokens=32, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with cluster.async_client() as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(all_of_them()) == [alone] * 8


# ---- mistakes ---------------------------------------------------------------------------------------------------

BAD_CHAT_FIELDS = [
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": 1e9}),
    ("top_p", {"top_p": 1.5}),
    ("max_tokens", {"max_tokens": -5}),
    ("max_tokens", {"max_tokens": 0}),
    ("n", {"n": 0}),
    ("n", {"n": 1_000_000}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": [""]}),
    ("seed", {"seed": "not a number"}),
    ("logit_bias", {"logit_bias": {"word": 1}}),
    ("logit_bias", {"logit_bias": {"5": 1000}}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "wizard", "content": "hi"}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("tools[0].type", {"tools": [{"type": "retrieval"}]}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("audio", {"extra_body": {"audio": {"voice": "x"}}}),
    ("top_k", {"extra_body": {"top_k": -7}}),
    ("stop_token_ids", {"extra_body": {"stop_token_ids": [-1]}}),
    ("priority", {"extra_body": {"priority": 0.5}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_CHAT_FIELDS)
def test_bad_fields_are_typed_errors(chat, param, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param.split("[")[0] in str(caught.value)


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**9], ["ok", ""], [[1], []]])
def test_bad_prompts(complete, prompt):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(prompt=prompt)
    assert caught.value.param == "prompt"


def test_unknown_model(chat, model):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(model="gpt-9")
    assert caught.value.code == "model_not_found" and model in str(caught.value)


def test_too_long(client, chat, model):
    limit = client.models.retrieve(model).max_model_len
    for fields in ({"max_tokens": limit}, {"messages": [{"role": "user", "content": "word " * (limit + 10)}]}):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(**fields)
        assert caught.value.code == "context_length_exceeded" and str(limit) in str(caught.value)


def test_fifty_megabytes(chat):
    with pytest.raises(openai.APIStatusError) as caught:
        chat(messages=[{"role": "user", "content": "x" * (50 << 20)}])
    assert caught.value.status_code == 413


def test_a_wrong_path(cluster):
    with pytest.raises(openai.NotFoundError):
        cluster.client().with_options(base_url=cluster.url + "/v9").models.list()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\xff\xfe"}', b'{"temperature": NaN}', b"[" * 5000])
def test_bodies_no_client_would_send(cluster, body):
    request = urllib.request.Request(cluster.url + "/v1/chat/completions", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 400
    assert b'"invalid_request_error"' in caught.value.read()


def test_a_deadline_that_cannot_be_met(chat):
    with pytest.raises(openai.APIStatusError) as caught:
        chat(messages=STORY, max_tokens=1000, extra_headers={"x-request-timeout-ms": "20"}, extra_body={"ignore_eos": True})
    assert caught.value.status_code == 504 and caught.value.code == "timeout"


# ---- structured outputs and tools -------------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_fits_its_schema(client, model, name):
    asked = {"model": model, "temperature": 1.0, "max_tokens": 300}
    assert ask_by_schema(client, asked, name, seed=1) is None


def test_parse(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "Invent a person."}], response_format=Person, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_the_other_grammars(chat, complete):
    assert chat(extra_body={"guided_choice": ["Paris", "Rome"]}).choices[0].message.content in ("Paris", "Rome")
    number = complete(max_tokens=20, extra_body={"structured_outputs": {"regex": "[1-9][0-9]{2}"}})
    assert 100 <= int(number.choices[0].text) <= 999 and number.choices[0].finish_reason == "stop"
    lark = complete(max_tokens=20, extra_body={"guided_grammar": 'start: "a" "b"* "."', "stream": False})
    assert set(lark.choices[0].text) <= {"a", "b", "."}
    with pytest.raises(openai.BadRequestError) as refused:
        complete(extra_body={"guided_regex": "("})
    assert refused.value.param == "guided_regex"


def test_words_and_tokens_that_may_not_appear(complete):
    free = complete(temperature=0, max_tokens=8, extra_body={"return_token_ids": True}).choices[0]
    assert "Paris" in free.text
    assert "Paris" not in complete(temperature=0, max_tokens=8, extra_body={"bad_words": ["Paris"]}).choices[0].text
    some = complete(max_tokens=8, extra_body={"allowed_token_ids": free.token_ids[:2], "return_token_ids": True})
    assert set(some.choices[0].token_ids) <= set(free.token_ids[:2])


def test_constraints_that_leave_no_token_in_the_middle_are_the_requests_mistake(complete):
    first = complete(temperature=0, max_tokens=1, extra_body={"return_token_ids": True}).choices[0]
    both = complete(temperature=0, max_tokens=2).choices[0]
    assert both.text.startswith(first.text) and len(both.text) > len(first.text)
    regex = "".join(f"[{letter}]" for letter in both.text)
    with pytest.raises(openai.BadRequestError) as refused:
        complete(max_tokens=8, extra_body={"guided_regex": regex, "allowed_token_ids": first.token_ids})
    assert refused.value.code == "every_token_ruled_out" and "allowed_token_ids" in refused.value.message


WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather of a place.", "parameters": {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["place", "days"], "additionalProperties": False,
}}}
QUESTION = [{"role": "user", "content": "How will the weather be in Rome?"}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_has_valid_arguments(client, model, choice):
    def ask(**fields):
        return client.chat.completions.create(
            model=model, messages=QUESTION, tools=[WEATHER], tool_choice=choice, max_tokens=400, seed=3, **fields
        )

    calls = ask().choices[0].message.tool_calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather" and set(arguments) == {"place", "days"} and 1 <= arguments["days"] <= 7
    streamed = "".join(
        part.function.arguments
        for chunk in ask(stream=True)
        for part in (chunk.choices[0].delta.tool_calls or [] if chunk.choices else [])
    )
    assert streamed == "".join(call.function.arguments for call in calls)


def test_results_of_tools_go_back(client, model):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome", "days": 1}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], max_tokens=16)
    assert answer.usage.prompt_tokens > 60 and answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


# ---- leaving ----------------------------------------------------------------------------------------------------


def test_early_close_frees_the_blocks_of_every_node(cluster, client, model):
    cluster.wait_until_idle(limit_s=10)
    for _ in range(5):
        stream = client.chat.completions.create(
            model=model, messages=STORY, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        seen = 0
        for _chunk in stream:
            seen += 1
            if seen == 5:
                break
        # The request is really under way, by the same measure that must say it is gone.
        deadline = time.monotonic() + 5
        while not any(cluster.held_blocks().values()):
            assert time.monotonic() < deadline, "the running request holds no block"
            time.sleep(0.02)
        stream.close()
        assert cluster.wait_until_idle(limit_s=1.0) < 1.0


def test_nothing_is_left_at_the_end(cluster):
    assert cluster.wait_until_idle(limit_s=2.0) < 2.0
