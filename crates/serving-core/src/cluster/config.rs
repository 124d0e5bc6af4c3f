//! The limits and switches of the coordinator's decisions, with their defaults.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::routing::RoutingPolicy;

/// Limits and switches of the brain. Every wait has its limit here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterConfig {
    /// Requests that may wait, over both lanes.
    pub queue_requests_max: usize,
    /// How long a request may wait for a place. This must be more than the time of one long prompt on the slowest machine that is
    /// meant to serve (2,000 tokens in exact numerics on two cores: 40 s). Otherwise the requests behind that prompt are turned away.
    pub queue_wait_max: Duration,
    /// While a request lacks room on its decode node, smaller requests that find no other node may overtake it there for this long.
    /// Afterwards the node keeps for it what becomes free.
    pub overtake_max: Duration,
    pub lease: Duration,
    /// The name that a node's model must have. `None`: any name.
    pub model_name: Option<String>,
    /// Prompts shorter than this are computed on the decode node; 0 is off.
    pub local_prefill_below_tokens: u32,
    pub allow_local_prefill: bool,
    /// Nodes answer between two steps, so this and the next limit must be longer than the longest step (512 tokens in exact numerics on
    /// a shared core: 40 s). Both are for an engine that hangs. A node that dies is noticed by its connection or its lease.
    pub open_timeout: Duration,
    pub prefill_start_timeout: Duration,
    /// The longest time without a message on either leg of a running request and without a report that its node computes. (While a node
    /// computes a long prompt on a slow machine it may send nothing on the stream for minutes.) It must be longer than the longest step.
    pub stream_silence_max: Duration,
    /// A request fails after so many broken attempts. An attempt that a node refused does not count, because nothing broke:
    /// `queue_wait_max` limits those. Nor does one that ended with its node's drain: a restart of all nodes, one after the other, uses up
    /// no attempt of a long answer.
    pub attempts_max: u32,
    /// So many retries a minute are not counted in the budget of PROTOCOL rule 10. With a few requests a minute a ratio alone would
    /// forbid the first retry.
    pub retries_free_per_minute: u64,
    pub routing: RoutingPolicy,
    pub on_illegal_transition: OnIllegalTransition,
}

/// An illegal transition is a bug of this crate. Tests stop at it; a service counts it and fails the one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnIllegalTransition {
    Panic,
    FailRequest,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            queue_requests_max: 2048,
            queue_wait_max: Duration::from_secs(60),
            overtake_max: Duration::from_secs(2),
            lease: Duration::from_secs(5),
            model_name: None,
            local_prefill_below_tokens: 0,
            allow_local_prefill: true,
            open_timeout: Duration::from_secs(60),
            prefill_start_timeout: Duration::from_secs(60),
            stream_silence_max: Duration::from_secs(60),
            attempts_max: 4,
            retries_free_per_minute: 10,
            routing: RoutingPolicy::LeastLoaded,
            on_illegal_transition: OnIllegalTransition::FailRequest,
        }
    }
}
