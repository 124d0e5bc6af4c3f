//! What the words of the report mean.

use crate::report::document::{Block, Section};
use crate::report::view::View;

const DEFINITIONS: [(&str, &str); 17] = [
    (
        "arm",
        "One configuration that is compared: a topology with its settings, or the address of a server.",
    ),
    (
        "shape",
        "One kind of traffic: lengths, arrivals and shared prefixes. Every arm gets the same requests.",
    ),
    (
        "due time",
        "When the trace says that a request arrives. In an open loop every latency counts from here, so a client or a server \
         that stands still cannot hide the wait. In a closed loop it is the moment of sending.",
    ),
    (
        "TTFT",
        "Time to first token: from the due time to the first event with a token, at the client.",
    ),
    (
        "ITL",
        "Inter-token latency: each gap between two events with a token. All gaps of all requests are one distribution.",
    ),
    (
        "TPOT",
        "Time per output token of one request: (last token - first token) / (output tokens - 1), as vLLM and OpenTelemetry \
         divide. NVIDIA NIM calls it ITL.",
    ),
    (
        "p99",
        "The 99th percentile: one of a hundred is above it. Between two samples it is interpolated, as numpy does.",
    ),
    (
        "lag",
        "How long after its due time the client sent a request. A p99 above 5 ms makes a run invalid.",
    ),
    (
        "SLO attainment",
        "The share of measured requests that completed within the limits for TTFT and for the 99th percentile of their own gaps.",
    ),
    (
        "goodput",
        "Requests a second that met both limits. What failed, was refused or was cancelled met none. In an open loop it is the offered \
         rate times SLO attainment, so a longer last answer does not lower it.",
    ),
    ("accepted tokens", "Output tokens of requests that met both limits."),
    (
        "knee",
        "The last load at which at least 90 % of the requests met both limits.",
    ),
    (
        "per core, per GPU",
        "Divided by all cores or GPUs of the arm, idle ones as well. An arm with GPUs is counted by GPUs.",
    ),
    (
        "interval",
        "A 95 % interval, out of two sources: how much the repeats differ (Student's t), and how much the figure changes when the \
         requests of the runs are drawn again in blocks (bootstrap).",
    ),
    (
        "wins, loses, no difference shown",
        "Whether the ratio of candidate to baseline is shown to lie on the good side of 1, on the bad side, or neither. Several \
         contrasts count together (Holm 1979), and a difference that is too small to matter counts as none.",
    ),
    (
        "handoff",
        "The KV cache of a prompt moves from the node that computed it to the node that generates the answer.",
    ),
    (
        "conditional",
        "Disaggregated, but prompts below a threshold are computed on the decode node and nothing is handed off.",
    ),
];

pub fn section(_: &View<'_>) -> Section {
    let mut section = Section::new("definitions", "Definitions");
    section.blocks.push(Block::Definitions(DEFINITIONS.into()));
    section
}
