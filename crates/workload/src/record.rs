//! What one run measured: a record for each request, and what the client and the server used.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serving_core::request::Lane;

/// One request as the client saw it. Times count from the start of the run, on the client's monotonic clock; in a
/// simulation on the virtual one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestRecord {
    /// The `x-request-id` it was sent with.
    pub id: String,
    pub part: RunPart,
    pub lane: Lane,
    /// As the server counted them, or as asked for when it does not tell.
    pub prompt_tokens: u32,
    /// Prompt tokens that the server took from its prefix cache, when it tells.
    pub cached_tokens: Option<u32>,
    pub output_tokens: u32,
    /// When it was due. In an open loop each latency counts from here, so a client or a server that stands still cannot hide
    /// the wait. In a closed loop it is `sent`.
    pub scheduled: Duration,
    /// When its bytes were handed to the connection.
    pub sent: Duration,
    /// When each event with a token came; the first one is the first token.
    pub tokens: Vec<Duration>,
    /// When the answer ended, well or not.
    pub ended: Duration,
    pub outcome: Outcome,
    /// A hash of the output's text or token ids. Equal hashes in two arms show that the answers are equal.
    pub output_hash: Option<u64>,
    /// What the server told of it, when it is a coordinator of baton.
    pub server: Option<ServerRecord>,
}

/// Which part of a run a request belongs to. Only measured requests count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunPart {
    WarmUp,
    Measured,
    CoolDown,
}

/// How a request ended. Everything but `Completed` counts against goodput.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Completed,
    /// 429 or 503: the server turned it away.
    Refused {
        status: u16,
    },
    Failed {
        error: String,
    },
    /// The client gave it up, on purpose.
    Cancelled,
}

/// What the coordinator's record says of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerRecord {
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
    /// Why the decode node computed the prompt itself; `None` when its KV was handed off.
    pub local_prefill: Option<String>,
    pub kv_bytes: Option<u64>,
    pub kv_transfer_ms: Option<f64>,
    /// Milliseconds of each stage, in order.
    pub stages: Vec<(String, f64)>,
}

/// One run: its requests and everything that is needed to judge them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The arm's name, or the server's address.
    pub name: String,
    pub loop_kind: LoopKind,
    /// Requests that were sent for each second of the measured part, or the concurrency of a closed loop.
    pub offered: f64,
    pub records: Vec<RequestRecord>,
    /// How long the measured part is (`LeftOut::measured_part` in `parts.rs`).
    pub measured: Duration,
    pub client: Usage,
    /// CPU of the server's processes, by name. Empty when they are not on this machine.
    pub server: BTreeMap<String, Usage>,
    /// Where and with what it was measured: machine, versions, flags, model. Names are those of the reports.
    pub environment: BTreeMap<String, serde_json::Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoopKind {
    /// Requests arrive when they are due, whatever the server does.
    Open,
    /// A request is sent when another has ended.
    Closed,
    /// Time is virtual: nothing was sent.
    Simulated,
}

/// What a process used during the measured part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    pub cpu: Duration,
    pub memory_bytes_max: u64,
}
