//! The labels of the metrics and their closed lists of values.
//!
//! Some lists belong to crates above or beside this one (causes of stalls, transports and their failures).
//! They are repeated here as text, and tests of those crates compare the two.

use serving_core::cluster::{HandoffOutcome, LegError, MigrationOutcome, NodeHealth, RefuseReason};
use serving_core::kv::reservation::LedgerError;
use serving_core::node::KvBlockCounts;
use serving_core::request::{Lane, LocalPrefillReason, RejectReason, RequestError};
use serving_core::routing::RouteReason;
use serving_core::scheduler::NodeFailure;
use serving_core::stage::Stage;

use super::{Label, Role, Values};

macro_rules! closed {
    ($($name:ident = $label:literal: $values:expr;)*) => {
        $(pub const $name: Label = Label { name: $label, values: Values::Closed($values) };)*
    };
}

closed! {
    LANE = "lane": |_| Lane::ALL.map(Lane::name).to_vec();
    OUTCOME = "outcome": |_| outcomes();
    STALL_CAUSE = "cause": |_| STALL_CAUSES.to_vec();
    BREACH = "breach": |_| BREACHES.to_vec();
    KEY_REFUSAL = "reason": |_| KEY_REFUSALS.to_vec();
    STAGE = "stage": |role| stage_names(measured_stages(role));
    LIVE_STAGE = "stage": |role| stage_names(live_stages(role));
    PHASE = "phase": |_| vec!["ttft", "rest"];
    ROUTE_REASON = "reason": |_| RouteReason::ALL.map(RouteReason::name).to_vec();
    LOCAL_PREFILL_REASON = "reason": |_| LocalPrefillReason::ALL.map(LocalPrefillReason::name).to_vec();
    RETRY_REASON = "reason": |_| LegError::NAMES.to_vec();
    REFUSE_REASON = "reason": |_| RefuseReason::ALL.map(RefuseReason::name).to_vec();
    MIGRATION_OUTCOME = "outcome": |_| MigrationOutcome::ALL.map(MigrationOutcome::name).to_vec();
    HANDOFF_TRANSPORT = "transport": handoff_transports;
    HANDOFF_OUTCOME = "outcome": handoff_outcomes;
    CARRIER = "transport": |role| match role {
        Role::Prefill => [&TRANSPORTS[..], &["unsettled"]].concat(),
        Role::Coordinator | Role::Decode => TRANSPORTS.to_vec(),
    };
    MOVED_BY = "transport": |_| TRANSPORTS.to_vec();
    SRC_ROLE = "src_role": |_| vec!["prefill"];
    TRANSFER_FAILURE = "reason": |role| match role {
        Role::Decode => transfer_failures_received(),
        Role::Coordinator | Role::Prefill => transfer_failures_sent(),
    };
    REQUEST_TRANSPORT = "transport": |_| [&TRANSPORTS[..], &["unsettled", "none"]].concat();
    PREFILL_OUTCOME = "outcome": |_| prefill_outcomes();
    WANTED_TRANSPORT = "transport": |_| vec!["cuda-ipc", "nccl", "shm", "shm-direct"];
    FALLBACK_REASON = "reason": |_| FALLBACK_REASONS.to_vec();
    RETRIED_TRANSPORT = "transport": |_| vec!["cuda-ipc", "shm"];
    TRANSPORT_RETRY_OUTCOME = "outcome": |_| vec!["taken", "never_quiet", "failed"];
    WAITING_REASON = "reason": |_| vec!["capacity"];
    MEMORY_KIND = "kind": |_| vec!["weights", "buffers", "kv", "free"];
    BLOCK_STATE = "state": |_| KvBlockCounts::default().by_state().map(|(state, _)| state).to_vec();
    NODE_STATE = "state": |_| NodeHealth::ALL.map(NodeHealth::name).to_vec();
    NODE_ROLE = "role": |_| vec!["prefill", "decode"];
    FINISHED_REASON = "finished_reason": |_| FINISHED_REASONS.to_vec();
    ENGINE = "engine": |_| vec!["0"];
}

pub const MODEL: Label = Label {
    name: "model",
    values: Values::OfProcess("the served model's name; `unknown` for a request that names another"),
};
pub const POLICY: Label = Label {
    name: "policy",
    values: Values::OfProcess("the coordinator's `routing`"),
};
pub const SLO: Label = Label {
    name: "slo",
    values: Values::OfProcess(
        "the profiles of the coordinator's `slo_config`, or the built-in ones; each from the start",
    ),
};
pub const MODEL_NAME: Label = Label {
    name: "model_name",
    values: Values::OfProcess("`served_model_name`"),
};
pub const BLOCK_SIZE: Label = Label {
    name: "block_size",
    values: Values::OfProcess("tokens of a KV block"),
};
pub const NUM_GPU_BLOCKS: Label = Label {
    name: "num_gpu_blocks",
    values: Values::OfProcess("blocks of the KV pool, wherever its memory is"),
};
const A_NODE: Values = Values::Open("a node's name");
pub const NODE: Label = Label {
    name: "node",
    values: A_NODE,
};
pub const PREFILL_NODE: Label = Label {
    name: "prefill_node",
    values: A_NODE,
};
pub const DECODE_NODE: Label = Label {
    name: "decode_node",
    values: A_NODE,
};
pub const PAIR_REASON: Label = Label {
    name: "reason",
    values: Values::Open("`usable`, or the label a prefill node gives for why its pair is not"),
};

/// `slo::Breach` of the coordinator.
const BREACHES: [&str; 5] = ["ttft", "itl", "incomplete", "hard_timeout", "5xx"];
/// Codes of `api::access` of the coordinator, and its `keys::OverLimit`.
const KEY_REFUSALS: [&str; 7] = [
    "missing_api_key",
    "invalid_api_key",
    "session_ended",
    "scope_missing",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
];
/// `records::stalls::StallCause` of the coordinator.
const STALL_CAUSES: [&str; 7] = [
    "transfer_tail",
    "preemption",
    "prefill_chunk",
    "step_time",
    "network",
    "egress_back_pressure",
    "migration",
];
/// `transports::kinds` of kv-transfer.
const TRANSPORTS: [&str; 5] = ["cuda-ipc", "nccl", "shm", "shm-direct", "grpc"];
/// `Fallbacks` of kv-transfer: the faults of its transports.
const FALLBACK_REASONS: [&str; 19] = [
    "disabled",
    "not_same_host",
    "unreachable",
    "uid",
    "refused",
    "seals",
    "geometry",
    "io",
    "time_out",
    "not_offered",
    "secret",
    "unwatched",
    "no_device",
    "no_secret",
    "pid_namespace",
    "device",
    "no_library",
    "version",
    "resting",
];
/// vLLM does not count a request that policy refused as finished.
pub const FINISHED_REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// The ways in which a generation request can end.
fn outcomes() -> Vec<&'static str> {
    let told = ["ok", "cancelled", "invalid_request"];
    let broke = RequestError::NAMES.iter();
    told.iter().chain(&RejectReason::NAMES).chain(broke).copied().collect()
}

/// A prefill node measures each of its stages, and can tell that a request is in it.
const PREFILL_STAGES: [Stage; 4] = [
    Stage::StepWait,
    Stage::PrefillQueue,
    Stage::PrefillForward,
    Stage::TransferTail,
];

/// The stages whose time a process exposes. The coordinator exposes the stages of all processes.
fn measured_stages(role: Role) -> &'static [Stage] {
    match role {
        Role::Coordinator => Stage::ALL,
        Role::Prefill => &PREFILL_STAGES,
        Role::Decode => &[
            Stage::StepWait,
            Stage::PrefillQueue,
            Stage::PrefillForward,
            Stage::Commit,
            Stage::DecodeQueue,
            Stage::Decode,
        ],
    }
}

/// The stages in which a process can tell that a request is now. The other stages are moments (`route`, `commit`), or are
/// known only when they are over (`first_token_return`).
pub fn live_stages(role: Role) -> &'static [Stage] {
    match role {
        Role::Coordinator => &[
            Stage::Parse,
            Stage::Tokenize,
            Stage::Queue,
            Stage::Reserve,
            Stage::Dispatch,
            Stage::PrefillForward,
            Stage::TransferTail,
            Stage::DecodeQueue,
            Stage::Decode,
        ],
        Role::Prefill => &PREFILL_STAGES,
        Role::Decode => &[
            Stage::StepWait,
            Stage::PrefillQueue,
            Stage::PrefillForward,
            Stage::TransferTail,
            Stage::DecodeQueue,
            Stage::Decode,
        ],
    }
}

/// `egress` names two stages.
fn stage_names(stages: &[Stage]) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = stages.iter().map(|stage| stage.name()).collect();
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(*name));
    names
}

fn handoff_transports(role: Role) -> Vec<&'static str> {
    match role {
        Role::Coordinator => [&TRANSPORTS[..], &["none"]].concat(),
        Role::Prefill => [&TRANSPORTS[..], &["unsettled"]].concat(),
        Role::Decode => TRANSPORTS.to_vec(),
    }
}

fn handoff_outcomes(role: Role) -> Vec<&'static str> {
    match role {
        Role::Coordinator => HandoffOutcome::ALL.map(HandoffOutcome::name).to_vec(),
        Role::Prefill => vec![
            "handed_over",
            "failed",
            "cancelled",
            "ended_at_first_token",
            "prefill_failed",
        ],
        Role::Decode => vec!["committed", "failed", "cancelled", "ended_at_first_token"],
    }
}

/// Of `sink::TransferRefusal` of kv-transfer, and of the decode node's own refusals to commit.
const REFUSALS: [&str; 7] = [
    "unknown_transfer",
    "checksum",
    "import",
    "request_gone",
    "not_receiving",
    "bad_first_tokens",
    "shutting_down",
];
/// The value for a reason that is not in the list.
pub const OTHER: &str = "other";

/// `transport::TransferError` of kv-transfer, with what the decode node may answer.
fn transfer_failures_sent() -> Vec<&'static str> {
    let own = [
        "hold_expired",
        "connecting",
        "unreachable",
        "broken",
        "stalled",
        "incompatible",
        "stale_epoch",
        "protocol_version",
        "shard",
        "no_transport",
        "closed",
        "aborted_by_peer",
        "layer_too_large",
        "no_place",
        "source",
        "stopping",
    ];
    [&own[..], &REFUSALS, &LedgerError::NAMES, &[OTHER]].concat()
}

/// `sink::ReceiveEnd` of kv-transfer.
fn transfer_failures_received() -> Vec<&'static str> {
    let own = ["aborted_by_sender", "pair_lost"];
    [&own[..], &REFUSALS, &LedgerError::NAMES, &[OTHER]].concat()
}

fn prefill_outcomes() -> Vec<&'static str> {
    let ended = ["handed_over", "ended_at_first_token", "cancelled"];
    let mut all: Vec<&'static str> = ended.to_vec();
    let named = NodeFailure::NAMES.into_iter();
    for name in named.chain(RefuseReason::ALL.map(RefuseReason::name)) {
        // `draining` is both a refusal and an end.
        if !all.contains(&name) {
            all.push(name);
        }
    }
    all
}
