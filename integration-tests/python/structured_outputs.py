#!/usr/bin/env python3
"""How many answers fit their JSON schema, over the schemas of `schemas.py`.

    PYTHONPATH=target/python-packages integration-tests/python/structured_outputs.py --base-url http://127.0.0.1:8000 --each 20

Each request has a seed, which its question names, too. An answer that ends by its budget of tokens counts as a failure. At last come forced calls
of a function, whose arguments have to fit its schema. Exit status 1 if any answer does not fit.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
from schemas import SCHEMAS


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--base-url", default="http://127.0.0.1:8000")
    parse.add_argument("--each", type=int, default=20)
    parse.add_argument("--calls", type=int, default=50)
    parse.add_argument("--at-once", type=int, default=4)
    parse.add_argument("--temperature", type=float, default=1.0, help="0: greedy requests, which ask their grammar token by token")
    args = parse.parse_args()
    client = openai.OpenAI(base_url=f"{args.base_url}/v1", api_key="none")
    asked = {"model": client.models.list().data[0].id, "temperature": args.temperature, "max_tokens": 300}
    failures = 0
    for name in SCHEMAS:
        with ThreadPoolExecutor(args.at_once) as pool:
            wrong = [why for why in pool.map(lambda seed: ask(client, asked, name, seed), range(args.each)) if why]
        failures += len(wrong)
        print(f"{name:18} {args.each - len(wrong):4} of {args.each} fit")
        for why in wrong[:3]:
            print(f"    {why}")
    print(f"{len(SCHEMAS) * args.each - failures} of {len(SCHEMAS) * args.each} answers fit their schema")
    with ThreadPoolExecutor(args.at_once) as pool:
        wrong = [why for why in pool.map(lambda seed: call(client, asked, seed), range(args.calls)) if why]
    failures += len(wrong)
    print(f"{args.calls - len(wrong)} of {args.calls} forced calls have valid arguments", *wrong[:3], sep="\n    ")
    sys.exit(1 if failures else 0)


def ask(client, asked, name, seed):
    """What is wrong with the answer, or None."""
    question, schema = SCHEMAS[name]
    answer = client.chat.completions.create(
        **asked,
        messages=[{"role": "user", "content": f"{question} ({seed}) Answer in JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
        seed=seed,
    )
    choice = answer.choices[0]
    return wrong(choice.message.content, choice.finish_reason, schema)


def call(client, asked, seed):
    """What is wrong with a call of a named function, or None."""
    question, schema = SCHEMAS["three levels"]
    answer = client.chat.completions.create(
        **asked,
        messages=[{"role": "user", "content": f"{question} ({seed})"}],
        tools=[{"type": "function", "function": {"name": "note", "description": "Notes a shop.", "parameters": schema}}],
        tool_choice={"type": "function", "function": {"name": "note"}},
        seed=seed,
    )
    choice = answer.choices[0]
    return wrong(choice.message.tool_calls[0].function.arguments, choice.finish_reason, schema)


def wrong(text, finish_reason, schema):
    if finish_reason != "stop":
        return f"ended by {finish_reason}: {text!r}"
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        return f"{error}: {text!r}"
    return None


if __name__ == "__main__":
    main()
