"""One streamed request as its client sees it, and the requests whose right answers are known."""

import http.client
import json
import random
import time
from dataclasses import dataclass, field

from traces.mixed import WORDS

MODEL = "smollm2-135m"
# Between a request's own deadline and the answer that says so (T8: 250 ms), on a busy machine.
GRACE_S = 2


@dataclass
class Answer:
    """`outcome`: ok, wrong (other tokens), error (said so), broken (ended without a word), stuck (did not end)."""

    began: float
    coordinator: tuple
    outcome: str = "stuck"
    why: str = ""
    id: str = ""
    ended: float = 0.0
    tokens: list = field(default_factory=list)


def body_of(turn, output_tokens):
    """Greedy and sampled in turn; each the same whenever it is asked."""
    dice = random.Random(turn)
    words = dice.randrange(30, 120)
    at = dice.randrange(0, len(WORDS) - words)
    body = {"prompt": " ".join(WORDS[at : at + words]), "max_tokens": output_tokens, "ignore_eos": True, "seed": turn}
    return body | ({"temperature": 0} if turn % 2 else {"temperature": 0.9, "top_p": 0.95})


def ask(coordinator, body, deadline_s, right=None):
    """`coordinator`: host and port. The deadline travels with the request, so that the cluster has to end it."""
    answer = Answer(time.monotonic(), coordinator)
    ends = answer.began + deadline_s + GRACE_S
    connection = http.client.HTTPConnection(*coordinator, timeout=deadline_s + GRACE_S)
    headers = {"content-type": "application/json", "x-request-timeout-ms": str(int(deadline_s * 1000))}
    body = {"model": MODEL, "stream": True, "return_token_ids": True} | body
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer.id = response.headers.get("x-request-id", "")
        if response.status != 200:
            raise Said(json.loads(response.read())["error"])
        is_finished = read(connection, response, ends, answer.tokens)
        answer.outcome = "ok" if is_finished else "broken"
        if right is not None and is_finished and answer.tokens != right:
            answer.outcome, answer.why = "wrong", f"{answer.tokens} instead of {right}"
    except Said as said:
        answer.outcome, answer.why = "error", str(said)
    except TimeoutError:
        answer.why = f"nothing more within {deadline_s} s and {GRACE_S} s"
    except (OSError, http.client.HTTPException, ValueError) as why:
        answer.outcome, answer.why = "broken", repr(why)
    finally:
        connection.close()
        answer.ended = time.monotonic()
    return answer


class Said(Exception):
    """An explicit error."""

    def __init__(self, error):
        super().__init__(f"{error['code']}: {error['message']}")


def read(connection, response, ends, tokens):
    """Whether it came to its proper end: a finish reason, then [DONE]."""
    is_finished = False
    # The connection forgets its socket where the answer has no length; the answer keeps it.
    socket = connection.sock or response.fp.raw._sock
    while True:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        socket.settimeout(left)
        line = response.readline()
        if not line:
            return False
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            return is_finished
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise Said(event["error"])
        for choice in event["choices"]:
            tokens.extend(choice.get("token_ids") or [])
            is_finished = is_finished or choice["finish_reason"] is not None
