"""Does a collector that is not ours get what `/admin/traces/{id}` shows? rotel, over both protocols, span by span."""

import pytest

from traces.checks import incomplete
from traces.mixed import WORDS, send, whole
from traces.processes import up
from traces.rotel import rotel, shown, wait_for

# The exporter and rotel both send in batches, each a fraction of a second.
RECEIVED_WITHIN_S = 20


def requests():
    """Streamed, chat, one token (the prefill node alone), local prefill, two choices; and streamed chat of two."""
    text = lambda turn, words: " ".join(WORDS[turn * 97 : turn * 97 + words])  # noqa: E731
    chat = lambda turn, words: {"messages": [{"role": "user", "content": text(turn, words)}]}  # noqa: E731
    return {
        "streamed": {"prompt": text(0, 60), "max_tokens": 8, "stream": True},
        "chat": chat(1, 40) | {"max_tokens": 6},
        "one-token": {"prompt": text(2, 50), "max_tokens": 1},
        "local": {"prompt": "Hello there", "max_tokens": 4},
        "two-choices": {"prompt": text(3, 30), "max_tokens": 3, "n": 2, "temperature": 0.7, "seed": 3},
        "streamed-chat-of-two": chat(4, 20) | {"max_tokens": 3, "n": 2, "stream": True, "temperature": 0.7, "seed": 4},
    }


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_from_outside_receives_what_is_shown(tmp_path, protocol):
    with rotel(tmp_path) as collector:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.grpc if protocol == "grpc" else collector.http,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "BATON_LOCAL_PREFILL_BELOW_TOKENS": "8",
        }
        expected, ways = {}, set()
        with up(tmp_path, "2p2d", env) as cluster:
            model = cluster.get("/v1/models")["data"][0]["id"]
            for name, body in requests().items():
                send(cluster.url, model, name, body | {"ignore_eos": True})
                request = whole(cluster.get, name, incomplete)["request"]
                ways.add(tuple(request[key] is not None for key in ("prefill_node", "decode_node", "transport")))
                expected |= shown(cluster.get(f"/admin/traces/{name}"))
            assert len(ways) == 3, f"split, prefill node alone, decode node alone: {ways}"
            wait_for(collector, expected, RECEIVED_WITHIN_S)
        collector.running.end()
        got = collector.spans()
    same(got, expected)
    services = {span["resource"]["service.name"][1] for span in got.values()}
    assert services == {"baton-coordinator", "baton-prefill", "baton-decode"}
    print(f"{len(got)} spans over {protocol}, each the same")


def same(got, expected):
    """Ids, parent, name, kind, times to the nanosecond, status, attributes with their types, events, links, resource."""
    assert set(got) == set(expected), "spans that only one of the two has"
    for id, span in expected.items():
        wrong = {key: (got[id].get(key), span[key]) for key in span if got[id].get(key) != span[key]}
        assert not wrong, f"{span['name']} {id}, received and shown: {wrong}"
        assert set(got[id]) == set(span)
