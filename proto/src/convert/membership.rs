//! The membership stream: registration, status, peers.

use std::time::Duration;

use serving_core::ids::{NodeEpoch, NodeId, NodeName};
use serving_core::kv::prefix_log::{PREFIX_KEYS_MAX, PrefixKey, PrefixReport};
use serving_core::node::{
    AssignedRole, KvBlockCounts, NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus, PairHealth, PermitNote,
};
use serving_core::time::Time;

use super::{
    ConvertError, Result, SMALL_LIST_MAX, at_most, compatibility, detail, millis, name, names, node_id, node_ref,
    required, unknown,
};
use crate::messages::{ClockOffset, ClockReading, CoordinatorReport, NodeReport, Peer, RegisterRefusedReason, Welcome};
use crate::v1;

impl From<ClockReading> for v1::ClockReading {
    fn from(reading: ClockReading) -> Self {
        Self {
            monotonic_ns: reading.monotonic.0,
            unix_ns: reading.unix_ns,
        }
    }
}

impl From<v1::ClockReading> for ClockReading {
    fn from(wire: v1::ClockReading) -> Self {
        Self {
            monotonic: Time(wire.monotonic_ns),
            unix_ns: wire.unix_ns,
        }
    }
}

impl From<NodeReport> for v1::NodeReport {
    fn from(report: NodeReport) -> Self {
        use v1::node_report::Report;
        let report = match report {
            NodeReport::Register(record) => Report::Register(register_to_wire(record)),
            NodeReport::Status { epoch, status } => Report::Status(status_to_wire(epoch, status)),
            NodeReport::Leave { reason } => Report::Leave(v1::Leave {
                reason: detail(&reason),
            }),
            NodeReport::Prefixes(report) => Report::Prefixes(prefixes_to_wire(report)),
            NodeReport::Clock(offset) => Report::Clock(v1::ClockReport {
                monotonic_offset_ns: offset.monotonic_ns,
                unix_offset_ns: offset.unix_ns,
                error_ns: u64::try_from(offset.error.as_nanos()).unwrap_or(u64::MAX),
            }),
        };
        Self { report: Some(report) }
    }
}

impl TryFrom<v1::NodeReport> for NodeReport {
    type Error = ConvertError;
    fn try_from(wire: v1::NodeReport) -> Result<Self> {
        use v1::node_report::Report;
        Ok(match required(wire.report, "node_report")? {
            Report::Register(record) => NodeReport::Register(register_from_wire(record)?),
            Report::Status(status) => NodeReport::Status {
                epoch: NodeEpoch(status.node_epoch),
                status: status_from_wire(status)?,
            },
            Report::Leave(leave) => NodeReport::Leave {
                reason: detail(&leave.reason),
            },
            Report::Prefixes(report) => NodeReport::Prefixes(prefixes_from_wire(report)?),
            Report::Clock(clock) => NodeReport::Clock(ClockOffset {
                monotonic_ns: clock.monotonic_offset_ns,
                unix_ns: clock.unix_offset_ns,
                error: Duration::from_nanos(clock.error_ns),
            }),
        })
    }
}

fn prefixes_to_wire(report: PrefixReport) -> v1::PrefixReport {
    let keys = |keys: Vec<PrefixKey>| keys.into_iter().map(|key| key.0).collect();
    match report {
        PrefixReport::Whole(listed) => v1::PrefixReport {
            whole: true,
            listed: keys(listed.into_iter().collect()),
            gone: Vec::new(),
        },
        PrefixReport::Changes { listed, gone } => v1::PrefixReport {
            whole: false,
            listed: keys(listed),
            gone: keys(gone),
        },
    }
}

fn prefixes_from_wire(wire: v1::PrefixReport) -> Result<PrefixReport> {
    let listed = at_most(wire.listed, PREFIX_KEYS_MAX, "prefixes.listed")?;
    let gone = at_most(wire.gone, PREFIX_KEYS_MAX, "prefixes.gone")?;
    Ok(match wire.whole {
        true if !gone.is_empty() => {
            return Err(ConvertError::Inconsistent {
                field: "prefixes.gone",
                why: "the report is whole",
            });
        }
        true => PrefixReport::Whole(listed.into_iter().map(PrefixKey).collect()),
        false => PrefixReport::Changes {
            listed: listed.into_iter().map(PrefixKey).collect(),
            gone: gone.into_iter().map(PrefixKey).collect(),
        },
    })
}

fn register_to_wire(record: NodeRecord) -> v1::Register {
    let (compatibility_hash, compatibility_facts) = compatibility::to_wire(record.compatibility);
    v1::Register {
        node: Some(node_ref(record.id)),
        role: match record.role {
            NodeRole::Prefill => v1::Role::Prefill,
            NodeRole::Decode => v1::Role::Decode,
        }
        .into(),
        co_located: record.is_co_located,
        address: record.address,
        kv_address: record.kv_address,
        compatibility_hash,
        compatibility_facts,
        transports: record.transports,
        version: record.version,
        capacity: Some(v1::NodeCapacity {
            kv_blocks: record.capacity.kv_blocks,
            block_tokens: record.capacity.block_tokens,
            max_num_seqs: record.capacity.max_sequences,
            max_num_batched_tokens: record.capacity.max_batch_tokens,
            max_model_len: record.capacity.max_model_tokens,
            block_bytes: record.capacity.block_bytes,
        }),
        model_name: record.model_name,
        state: state_to_wire(record.state).into(),
        roles: record.roles.into_iter().map(|role| role_to_wire(role).into()).collect(),
    }
}

fn role_to_wire(role: AssignedRole) -> v1::AssignedRole {
    match role {
        AssignedRole::Prefill => v1::AssignedRole::Prefill,
        AssignedRole::Decode => v1::AssignedRole::Decode,
        AssignedRole::CoLocated => v1::AssignedRole::CoLocated,
    }
}

/// `None` for no value, and for a value that only a later version knows.
fn role_from_wire(wire: i32) -> Option<AssignedRole> {
    match v1::AssignedRole::try_from(wire) {
        Ok(v1::AssignedRole::Prefill) => Some(AssignedRole::Prefill),
        Ok(v1::AssignedRole::Decode) => Some(AssignedRole::Decode),
        Ok(v1::AssignedRole::CoLocated) => Some(AssignedRole::CoLocated),
        Ok(v1::AssignedRole::Unspecified) | Err(_) => None,
    }
}

fn register_from_wire(wire: v1::Register) -> Result<NodeRecord> {
    let role = match v1::Role::try_from(wire.role) {
        Ok(v1::Role::Prefill) => NodeRole::Prefill,
        Ok(v1::Role::Decode) => NodeRole::Decode,
        _ => return Err(unknown("register.role", wire.role)),
    };
    if wire.co_located && role == NodeRole::Prefill {
        return Err(ConvertError::Inconsistent {
            field: "register.co_located",
            why: "only a decode node can be co-located",
        });
    }
    let capacity = required(wire.capacity, "register.capacity")?;
    if capacity.block_tokens == 0 {
        return Err(ConvertError::OutOfRange {
            field: "register.capacity.block_tokens",
            value: "0".to_owned(),
            allowed: "1 and up",
        });
    }
    let address = name(wire.address, "register.address")?;
    let kv_address = match wire.kv_address.is_empty() {
        true => address.clone(),
        false => name(wire.kv_address, "register.kv_address")?,
    };
    let told = (&wire.compatibility_hash[..], wire.compatibility_facts);
    Ok(NodeRecord {
        id: node_id(wire.node, "register.node")?,
        role,
        is_co_located: wire.co_located,
        address,
        kv_address,
        compatibility: compatibility::from_wire(told, "register.compatibility_hash")?,
        transports: names(wire.transports, "register.transports")?,
        version: name(wire.version, "register.version")?,
        capacity: NodeCapacity {
            kv_blocks: capacity.kv_blocks,
            block_tokens: capacity.block_tokens,
            max_sequences: capacity.max_num_seqs,
            max_batch_tokens: capacity.max_num_batched_tokens,
            max_model_tokens: capacity.max_model_len,
            block_bytes: capacity.block_bytes,
        },
        model_name: name(wire.model_name, "register.model_name")?,
        state: state_from_wire(wire.state, "register.state")?,
        roles: at_most(wire.roles, SMALL_LIST_MAX, "register.roles")?
            .into_iter()
            .filter_map(role_from_wire)
            .collect(),
    })
}

fn status_to_wire(epoch: NodeEpoch, status: NodeStatus) -> v1::NodeStatus {
    v1::NodeStatus {
        node_epoch: epoch.0,
        state: state_to_wire(status.state).into(),
        permits_granted_total: status.permits_granted_total,
        permits_received_total: status.permits_received_total,
        permits_recalled_total: status.permits_recalled_total,
        coordinators: status.coordinators,
        kv_blocks: Some(v1::KvBlockCounts {
            free: status.kv_blocks.free,
            active: status.kv_blocks.active,
            cached: status.kv_blocks.cached,
            reserved: status.kv_blocks.reserved,
            in_transfer: status.kv_blocks.in_transfer,
            quarantined: status.kv_blocks.quarantined,
        }),
        running_sequences: status.running_sequences,
        waiting_sequences: status.waiting_sequences,
        waiting_tokens: status.waiting_tokens,
        prefix_query_tokens_total: status.prefix_query_tokens_total,
        prefix_hit_tokens_total: status.prefix_hit_tokens_total,
        preemptions_total: status.preemptions_total,
        computed_tokens_total: status.computed_tokens_total,
        pairs: status
            .pairs
            .into_iter()
            .map(|pair| v1::PairHealth {
                decode_node: Some(node_ref(pair.decode_node)),
                usable: pair.unusable_reason.is_none(),
                reason: pair.unusable_reason.unwrap_or_default(),
                transport: pair.transport.unwrap_or_default(),
            })
            .collect(),
    }
}

fn status_from_wire(wire: v1::NodeStatus) -> Result<NodeStatus> {
    let pairs = at_most(wire.pairs, SMALL_LIST_MAX, "status.pairs")?
        .into_iter()
        .map(|pair| {
            let unusable_reason = match pair.usable {
                true => None,
                false => Some(name(pair.reason, "status.pairs.reason")?),
            };
            Ok(PairHealth {
                decode_node: node_id(pair.decode_node, "status.pairs.decode_node")?,
                unusable_reason,
                transport: Some(pair.transport)
                    .filter(|transport| !transport.is_empty())
                    .map(|transport| name(transport, "status.pairs.transport"))
                    .transpose()?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(NodeStatus {
        state: state_from_wire(wire.state, "status.state")?,
        permits_granted_total: wire.permits_granted_total,
        permits_received_total: wire.permits_received_total,
        permits_recalled_total: wire.permits_recalled_total,
        permits_received_by: Vec::new(),
        coordinators: wire.coordinators,
        kv_blocks: block_counts(required(wire.kv_blocks, "status.kv_blocks")?)?,
        running_sequences: wire.running_sequences,
        waiting_sequences: wire.waiting_sequences,
        waiting_tokens: wire.waiting_tokens,
        prefix_query_tokens_total: wire.prefix_query_tokens_total,
        prefix_hit_tokens_total: wire.prefix_hit_tokens_total,
        preemptions_total: wire.preemptions_total,
        computed_tokens_total: wire.computed_tokens_total,
        pairs,
    })
}

/// Other code adds these numbers up, so their sum must fit.
fn block_counts(wire: v1::KvBlockCounts) -> Result<KvBlockCounts> {
    let parts = [
        wire.free,
        wire.active,
        wire.cached,
        wire.reserved,
        wire.in_transfer,
        wire.quarantined,
    ];
    let total: u64 = parts.iter().copied().map(u64::from).sum();
    if u32::try_from(total).is_err() {
        return Err(ConvertError::OutOfRange {
            field: "status.kv_blocks",
            value: total.to_string(),
            allowed: "a sum below 2^32",
        });
    }
    Ok(KvBlockCounts {
        free: wire.free,
        active: wire.active,
        cached: wire.cached,
        reserved: wire.reserved,
        in_transfer: wire.in_transfer,
        quarantined: wire.quarantined,
    })
}

fn state_to_wire(state: NodeState) -> v1::NodeState {
    match state {
        NodeState::Joining => v1::NodeState::Joining,
        NodeState::Ready => v1::NodeState::Ready,
        NodeState::Draining => v1::NodeState::Draining,
    }
}

fn state_from_wire(wire: i32, field: &'static str) -> Result<NodeState> {
    match v1::NodeState::try_from(wire) {
        Ok(v1::NodeState::Joining) => Ok(NodeState::Joining),
        Ok(v1::NodeState::Ready) => Ok(NodeState::Ready),
        Ok(v1::NodeState::Draining) => Ok(NodeState::Draining),
        _ => Err(unknown(field, wire)),
    }
}

impl From<CoordinatorReport> for v1::CoordinatorReport {
    fn from(report: CoordinatorReport) -> Self {
        use v1::coordinator_report::Report;
        let report = match report {
            CoordinatorReport::Welcome(welcome) => Report::Welcome(v1::Welcome {
                coordinator: welcome.coordinator.name.as_str().to_owned(),
                coordinator_epoch: welcome.coordinator.epoch.0,
                lease_ms: millis(welcome.lease),
                status_interval_ms: millis(welcome.status_interval),
                takes_prefixes: welcome.takes_prefixes,
            }),
            CoordinatorReport::Renewed { lease } => Report::Renewed(v1::LeaseRenewed {
                lease_ms: millis(lease),
            }),
            CoordinatorReport::Peers(peers) => Report::Peers(v1::PeerList {
                peers: peers.into_iter().map(peer_to_wire).collect(),
            }),
            CoordinatorReport::RegisterRefused { reason, detail: text } => Report::Refused(v1::RegisterRefused {
                reason: reason.name().to_owned(),
                detail: detail(&text),
            }),
            CoordinatorReport::Drain { reason, next_role } => Report::Drain(v1::DrainRequest {
                reason: detail(&reason),
                next_role: next_role.map_or(v1::AssignedRole::Unspecified, role_to_wire).into(),
            }),
            CoordinatorReport::Permits(note) => Report::Permits(v1::PermitNote {
                wanted: note.wanted,
                waited_ns: u64::try_from(note.waited.as_nanos()).unwrap_or(u64::MAX),
                returned_total: note.returned_total,
            }),
        };
        Self { report: Some(report) }
    }
}

impl TryFrom<v1::CoordinatorReport> for CoordinatorReport {
    type Error = ConvertError;
    fn try_from(wire: v1::CoordinatorReport) -> Result<Self> {
        use v1::coordinator_report::Report;
        Ok(match required(wire.report, "coordinator_report")? {
            Report::Welcome(welcome) => CoordinatorReport::Welcome(Welcome {
                coordinator: NodeId {
                    name: NodeName::new(&name(welcome.coordinator, "welcome.coordinator")?),
                    epoch: NodeEpoch(welcome.coordinator_epoch),
                },
                lease: interval(welcome.lease_ms, "welcome.lease_ms")?,
                status_interval: interval(welcome.status_interval_ms, "welcome.status_interval_ms")?,
                takes_prefixes: welcome.takes_prefixes,
            }),
            Report::Renewed(renewed) => CoordinatorReport::Renewed {
                lease: interval(renewed.lease_ms, "renewed.lease_ms")?,
            },
            Report::Peers(list) => CoordinatorReport::Peers(
                at_most(list.peers, SMALL_LIST_MAX, "peers")?
                    .into_iter()
                    .map(peer_from_wire)
                    .collect::<Result<_>>()?,
            ),
            Report::Refused(refused) => CoordinatorReport::RegisterRefused {
                reason: *RegisterRefusedReason::ALL
                    .iter()
                    .find(|reason| reason.name() == refused.reason)
                    .ok_or_else(|| ConvertError::Unknown {
                        field: "refused.reason",
                        value: detail(&refused.reason),
                    })?,
                detail: detail(&refused.detail),
            },
            Report::Drain(drain) => CoordinatorReport::Drain {
                reason: detail(&drain.reason),
                next_role: role_from_wire(drain.next_role),
            },
            Report::Permits(note) => CoordinatorReport::Permits(PermitNote {
                wanted: note.wanted,
                waited: Duration::from_nanos(note.waited_ns),
                returned_total: note.returned_total,
            }),
        })
    }
}

/// Zero would make a node report or renew without a pause. Beyond a day nothing would be noticed any more.
fn interval(ms: u64, field: &'static str) -> Result<Duration> {
    const DAY_MS: u64 = 86_400_000;
    if (1..=DAY_MS).contains(&ms) {
        return Ok(Duration::from_millis(ms));
    }
    Err(ConvertError::OutOfRange {
        field,
        value: ms.to_string(),
        allowed: "1 ms to one day",
    })
}

fn peer_to_wire(peer: Peer) -> v1::Peer {
    let (compatibility_hash, compatibility_facts) = compatibility::to_wire(peer.compatibility);
    v1::Peer {
        node: Some(node_ref(peer.node)),
        address: peer.address,
        transports: peer.transports,
        compatibility_hash,
        compatibility_facts,
    }
}

fn peer_from_wire(wire: v1::Peer) -> Result<Peer> {
    let told = (&wire.compatibility_hash[..], wire.compatibility_facts);
    Ok(Peer {
        node: node_id(wire.node, "peers.node")?,
        address: name(wire.address, "peers.address")?,
        transports: names(wire.transports, "peers.transports")?,
        compatibility: compatibility::from_wire(told, "peers.compatibility_hash")?,
    })
}
