#!/usr/bin/env python3
"""What a grammar costs a token: eight requests at a time with one and without one, in turn.

    integration-tests/python/grammar_cost.py --base-url http://127.0.0.1:8000 --pairs 20

Each request makes 64 tokens; the time of a token is the server's own `mean_itl_ms`. It prints the median of the ratios of the pairs, and
their quartiles.
"""

import argparse
import json
import statistics
import urllib.request
from concurrent.futures import ThreadPoolExecutor

AT_ONCE = 8
SCHEMA = {
    "type": "object", "required": ["kind", "words"], "additionalProperties": False,
    "properties": {"kind": {"enum": ["story", "poem"]}, "words": {"type": "array", "minItems": 90, "items": {"type": "string", "maxLength": 12}}},
}


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--base-url", default="http://127.0.0.1:8000")
    parse.add_argument("--pairs", type=int, default=20)
    parse.add_argument("--temperature", type=float, default=0.0, help="a greedy request seldom needs all tokens that its grammar allows")
    args = parse.parse_args()
    run(args, False), run(args, True)
    ratios = []
    for pair in range(args.pairs):
        order = (True, False) if pair % 2 else (False, True)
        times = {constrained: run(args, constrained) for constrained in order}
        ratios.append(times[True] / times[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"a token with a grammar takes {middle:.3f} times as long (quartiles {low:.3f} and {high:.3f}, {args.pairs} pairs of "
          f"{AT_ONCE} requests)")


def run(args, is_constrained):
    """The mean time of a token in ms, over requests that run together."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return statistics.mean(pool.map(lambda number: ask(args, number, is_constrained), range(AT_ONCE)))


def ask(args, number, is_constrained):
    body = {"prompt": f"{number}. Words of a story, as JSON:", "max_tokens": 64, "temperature": args.temperature, "include_metrics": True}
    body |= {"guided_json": SCHEMA} if is_constrained else {"ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{args.base_url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer = json.load(answer)
    assert answer["usage"]["completion_tokens"] == 64, answer
    return answer["metrics"]["mean_itl_ms"]


if __name__ == "__main__":
    main()
