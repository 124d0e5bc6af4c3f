//! What the coordinator sends to start the two legs of a request: Open and Prefill. Also the ticket, which comes back with Opened and goes
//! out with Prefill.

use std::time::Duration;

use serving_core::ids::{BlockId, Generation, NodeEpoch};
use serving_core::node::Ticket;
use serving_core::request::LocalPrefillReason;

use super::request::{request_from_wire, request_to_wire};
use super::{
    ConvertError, LARGE_LIST_MAX, Result, at_most, id_to_wire, name, nanos, node_id, node_ref, transfer_id, unknown,
};
use crate::messages::{OpenRequest, PrefillRequest};
use crate::v1;

impl From<OpenRequest> for v1::OpenRequest {
    fn from(open: OpenRequest) -> Self {
        Self {
            request: Some(request_to_wire(open.request, open.attempt)),
            node_epoch: open.node_epoch.0,
            permit_blocks: open.permit_blocks,
            coordinator_epoch: open.coordinator_epoch.0,
            local_prefill: open.local_prefill.map(|reason| local_prefill_to_wire(reason).into()),
            prefill_node: open.prefill_node.map(node_ref),
        }
    }
}

impl TryFrom<v1::OpenRequest> for OpenRequest {
    type Error = ConvertError;
    fn try_from(wire: v1::OpenRequest) -> Result<Self> {
        let (request, attempt) = request_from_wire(wire.request)?;
        let local_prefill = wire.local_prefill.map(local_prefill_from_wire).transpose()?;
        let prefill_node = match wire.prefill_node {
            Some(node) => Some(node_id(Some(node), "prefill_node")?),
            None => None,
        };
        if local_prefill.is_some() == prefill_node.is_some() {
            return Err(ConvertError::Inconsistent {
                field: "prefill_node",
                why: "either a prefill node pushes or the prompt is computed locally",
            });
        }
        Ok(Self {
            attempt,
            request,
            node_epoch: NodeEpoch(wire.node_epoch),
            permit_blocks: wire.permit_blocks,
            coordinator_epoch: NodeEpoch(wire.coordinator_epoch),
            local_prefill,
            prefill_node,
        })
    }
}

impl From<PrefillRequest> for v1::PrefillRequest {
    fn from(prefill: PrefillRequest) -> Self {
        Self {
            request: Some(request_to_wire(prefill.request, prefill.attempt)),
            node_epoch: prefill.node_epoch.0,
            permit_tokens: prefill.permit_tokens,
            coordinator_epoch: prefill.coordinator_epoch.0,
            ticket: prefill.ticket.map(Into::into),
        }
    }
}

impl TryFrom<v1::PrefillRequest> for PrefillRequest {
    type Error = ConvertError;
    fn try_from(wire: v1::PrefillRequest) -> Result<Self> {
        let (request, attempt) = request_from_wire(wire.request)?;
        Ok(Self {
            attempt,
            request,
            node_epoch: NodeEpoch(wire.node_epoch),
            permit_tokens: wire.permit_tokens,
            coordinator_epoch: NodeEpoch(wire.coordinator_epoch),
            ticket: wire.ticket.map(TryInto::try_into).transpose()?,
        })
    }
}

impl From<Ticket> for v1::Ticket {
    fn from(ticket: Ticket) -> Self {
        Self {
            transfer_id: id_to_wire(ticket.transfer.0),
            decode_node: Some(node_ref(ticket.decode_node)),
            blocks: ticket
                .blocks
                .into_iter()
                .map(|(block, generation)| v1::TicketBlock {
                    block: block.0,
                    generation: generation.0,
                })
                .collect(),
            total_bytes: ticket.total_bytes,
            expires_in_ns: nanos(ticket.expires_in),
            prefix_blocks: ticket.prefix_blocks,
            decode_address: ticket.decode_address,
        }
    }
}

impl TryFrom<v1::Ticket> for Ticket {
    type Error = ConvertError;
    fn try_from(wire: v1::Ticket) -> Result<Self> {
        Ok(Self {
            transfer: transfer_id(&wire.transfer_id, "ticket.transfer_id")?,
            decode_node: node_id(wire.decode_node, "ticket.decode_node")?,
            decode_address: name(wire.decode_address, "ticket.decode_address")?,
            blocks: at_most(wire.blocks, LARGE_LIST_MAX, "ticket.blocks")?
                .into_iter()
                .map(|entry| (BlockId(entry.block), Generation(entry.generation)))
                .collect(),
            prefix_blocks: wire.prefix_blocks,
            total_bytes: wire.total_bytes,
            expires_in: Duration::from_nanos(wire.expires_in_ns),
        })
    }
}

fn local_prefill_to_wire(reason: LocalPrefillReason) -> v1::LocalPrefillReason {
    match reason {
        LocalPrefillReason::Short => v1::LocalPrefillReason::Short,
        LocalPrefillReason::Cached => v1::LocalPrefillReason::Cached,
        LocalPrefillReason::NoPrefillNode => v1::LocalPrefillReason::NoPrefillNode,
        LocalPrefillReason::TransferFailed => v1::LocalPrefillReason::TransferFailed,
        LocalPrefillReason::CoLocated => v1::LocalPrefillReason::CoLocated,
    }
}

fn local_prefill_from_wire(wire: i32) -> Result<LocalPrefillReason> {
    match v1::LocalPrefillReason::try_from(wire) {
        Ok(v1::LocalPrefillReason::Short) => Ok(LocalPrefillReason::Short),
        Ok(v1::LocalPrefillReason::Cached) => Ok(LocalPrefillReason::Cached),
        Ok(v1::LocalPrefillReason::NoPrefillNode) => Ok(LocalPrefillReason::NoPrefillNode),
        Ok(v1::LocalPrefillReason::TransferFailed) => Ok(LocalPrefillReason::TransferFailed),
        Ok(v1::LocalPrefillReason::CoLocated) => Ok(LocalPrefillReason::CoLocated),
        _ => Err(unknown("local_prefill", wire)),
    }
}
