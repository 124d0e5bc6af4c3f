//! Records and requests for the tests of this folder.

use std::sync::Arc;
use std::time::Duration;

use crate::compatibility::CompatibilityHash;
use crate::ids::{NodeEpoch, NodeId, NodeName, RequestId, TokenId};
use crate::node::{KvBlockCounts, NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus};
use crate::request::{Lane, Request, SamplingParams, StopConditions};

pub(crate) fn request(id: u128, prompt_tokens: u32, max_tokens: u32) -> Request {
    let prompt: Vec<TokenId> = (0..prompt_tokens).map(TokenId).collect();
    Request {
        id: RequestId(id),
        prompt: Arc::from(prompt),
        client_prompt_tokens: prompt_tokens,
        constraint: Default::default(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            end_tokens: vec![],
            stop_token_ids: vec![],
        },
        choice_count: 1,
        seed: 1,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(60),
    }
}

pub(crate) fn node_record(name: &str, epoch: u64, role: NodeRole) -> NodeRecord {
    NodeRecord {
        id: NodeId {
            name: NodeName::new(name),
            epoch: NodeEpoch(epoch),
        },
        role,
        is_co_located: false,
        address: format!("{name}:1"),
        kv_address: format!("{name}:1"),
        compatibility: CompatibilityHash([1; 32]).into(),
        transports: vec!["grpc".into()],
        version: "test".into(),
        capacity: NodeCapacity {
            kv_blocks: 64,
            block_tokens: 16,
            max_sequences: 4,
            max_batch_tokens: 128,
            max_model_tokens: 2048,
            block_bytes: 1,
        },
        model_name: "smol".into(),
        state: NodeState::Ready,
        roles: Vec::new(),
    }
}

pub(crate) fn ready_status(granted_total: u64) -> NodeStatus {
    NodeStatus {
        state: NodeState::Ready,
        permits_granted_total: granted_total,
        permits_received_total: 0,
        permits_recalled_total: 0,
        permits_received_by: vec![],
        coordinators: 1,
        kv_blocks: KvBlockCounts {
            free: 64,
            ..KvBlockCounts::default()
        },
        running_sequences: 0,
        waiting_sequences: 0,
        waiting_tokens: 0,
        prefix_query_tokens_total: 0,
        prefix_hit_tokens_total: 0,
        preemptions_total: 0,
        computed_tokens_total: 0,
        pairs: vec![],
    }
}
