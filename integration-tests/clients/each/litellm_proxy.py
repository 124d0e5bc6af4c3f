"""LiteLLM's proxy before the cluster, and OpenAI's client before the proxy."""

import json
import os
import secrets

import openai
from rows import FOLDER, MODEL, PROGRAMS, QUESTIONS, TOO_LONG, URL, WEATHER, WEATHER_QUESTION
from rows import refused, request, service, user

PORT = os.environ["CLIENT_PORT"]
COUNTED = {"stream": True, "stream_options": {"include_usage": True}}
PROVIDERS = {"chat": "hosted_vllm", "text": "text-completion-openai"}
KEY = f"sk-{secrets.token_hex(32)}"
AT = {"api_base": f"{URL}/v1", "api_key": "none"}
# JSON is YAML. It hands x-request-id on, so that a record is found by the client's id.
CONFIG = {
    "model_list": [
        {"model_name": name, "litellm_params": {"model": f"{provider}/{MODEL}", **AT}} for name, provider in PROVIDERS.items()
    ],
    "general_settings": {"forward_client_headers_to_llm_api": True, "master_key": KEY},
    "litellm_settings": {"num_retries": 0},
}


def finish(row, answer):
    row.done(answer.usage.prompt_tokens, answer.usage.completion_tokens)


def follow(row, stream):
    chunks = []
    for chunk in stream:
        row.first()
        chunks.append(chunk)
    finish(row, next(chunk for chunk in reversed(chunks) if chunk.usage))


def plain(client, question):
    chat, text = {"model": "chat", "messages": user(question)}, {"model": "text", "prompt": question}
    with request("chat") as row:
        finish(row, client.chat.completions.create(max_tokens=24, extra_headers=row.headers, **chat))
    with request("chat, stream") as row:
        follow(row, client.chat.completions.create(max_tokens=24, extra_headers=row.headers, **chat, **COUNTED))
    with request("completion") as row:
        finish(row, client.completions.create(max_tokens=24, extra_headers=row.headers, **text))
    with request("completion, stream") as row:
        follow(row, client.completions.create(max_tokens=24, extra_headers=row.headers, **text, **COUNTED))


def tools(client):
    named = {"type": "function", "function": {"name": "weather"}}
    ask = {"model": "chat", "messages": user(WEATHER_QUESTION), "tools": [WEATHER], "max_tokens": 400}
    for choice in ("required", named):
        with request("tools") as row:
            answer = client.chat.completions.create(tool_choice=choice, extra_headers=row.headers, **ask)
            finish(row, answer)
            calls = answer.choices[0].message.tool_calls
            assert calls and all(1 <= json.loads(call.function.arguments)["days"] <= 7 for call in calls)


config = FOLDER / "proxy.yaml"
config.write_text(json.dumps(CONFIG))
words = [PROGRAMS / "litellm", "--config", config, "--host", "127.0.0.1", "--port", PORT, "--telemetry", "False"]
at = f"http://127.0.0.1:{PORT}"
with service(words, f"{at}/health/liveliness", 180, LITELLM_LOCAL_MODEL_COST_MAP="True"):
    proxied = openai.OpenAI(base_url=f"{at}/v1", api_key=KEY, max_retries=0, timeout=120)
    for question in QUESTIONS * 2:
        plain(proxied, question)
    tools(proxied)
    with refused("too long", openai.BadRequestError, "ContextWindowExceededError") as row:
        proxied.chat.completions.create(model="chat", messages=user(TOO_LONG), extra_headers=row.headers)
