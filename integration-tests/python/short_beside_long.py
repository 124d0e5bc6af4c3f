"""A program, not a test: how long a short prompt waits for its first token while a long batch prompt computes, by two binaries.

    python3 integration-tests/python/short_beside_long.py OLD_BATON NEW_BATON [ROUNDS]

Each binary in turn runs `baton up` with steps of 128 tokens and the real model. A round is a long batch prompt alone, then another
one with a short interactive prompt 0.15 s behind it. Prints medians over the rounds.
"""

import json
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

LONG_WORDS, SHORT_WORDS, BEHIND_SECONDS = 600, 5, 0.15
WORDS = ["red", "blue", "tree", "sun", "sea", "hill", "road", "song"]


def first_token_seconds(url, prompt, lane):
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    headers = {"content-type": "application/json", "x-lane": lane}
    request = urllib.request.Request(url + "/v1/completions", data=json.dumps(body).encode(), headers=headers)
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as answer:
        next(line for line in answer if line.startswith(b"data: {"))
        first = time.monotonic() - began
        answer.read()
    return first


def rounds_of(binary, count):
    up = [binary, "up", "--listen", "127.0.0.1:0", "--max-num-batched-tokens", "128", "--json"]
    process = subprocess.Popen(up, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = json.loads(process.stdout.readline())["url"]
        return [one_round(url, number) for number in range(count)]
    finally:
        process.terminate()
        process.wait()


def one_round(url, number):
    draw = random.Random(number)

    def prompt(start, words):
        return f"{start}{number} " + " ".join(draw.choice(WORDS) + str(draw.randrange(99)) for _ in range(words))

    alone = first_token_seconds(url, prompt("A", LONG_WORDS), "batch")
    beside = []
    long_prompt = prompt("B", LONG_WORDS)
    thread = threading.Thread(target=lambda: beside.append(first_token_seconds(url, long_prompt, "batch")))
    thread.start()
    time.sleep(BEHIND_SECONDS)
    short = first_token_seconds(url, prompt("S", SHORT_WORDS), "interactive")
    thread.join()
    return alone, beside[0], short


def main():
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 8
    for name, binary in (("old", sys.argv[1]), ("new", sys.argv[2])):
        rounds = rounds_of(binary, count)
        alone, beside, short = (statistics.median(figures) * 1000 for figures in zip(*rounds))
        ratio = statistics.median(beside / alone for alone, beside, _ in rounds)
        print(f"{name}: short {short:.0f} ms; long {beside:.0f} ms, alone {alone:.0f} ms, {ratio:.2f} times (medians of {count})")


if __name__ == "__main__":
    main()
