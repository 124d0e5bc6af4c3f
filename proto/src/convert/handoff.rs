//! KV frames and their replies. Sizes and references are checked for form only. The receiver's ledger decides whether a
//! frame belongs to a reservation.

use serving_core::ids::{Attempt, BlockId, Generation, NodeId};

use super::tokens::tokens_from_wire;
use super::{
    ConvertError, Result, SMALL_LIST_MAX, at_most, compatibility, detail, id_to_wire, name, node_id, node_ref,
    request_id, required, transfer_id,
};
use crate::messages::{
    Hello, HelloRefused, HelloRefusedReason, HelloReply, KvBlockFrame, KvFrame, KvReply, KvShard, LastFrame,
    StagedBlock, StagedFrame, StagedReply, TRANSPORT_OFFER_BYTES_MAX, TransportOffer,
};
use crate::v1;

/// The length of a context of version 00 is 55.
const TRACEPARENT_BYTES_MAX: usize = 128;

impl From<KvFrame> for v1::KvFrame {
    fn from(frame: KvFrame) -> Self {
        use v1::kv_frame::Frame;
        let frame = match frame {
            KvFrame::Hello(hello) => Frame::Hello(hello_to_wire(hello)),
            KvFrame::Begin { transfer } => Frame::Begin(v1::Begin {
                transfer_id: id_to_wire(transfer.0),
            }),
            KvFrame::Block(block) => Frame::Block(v1::KvBlock {
                transfer_id: id_to_wire(block.transfer.0),
                sequence_no: block.sequence_no,
                ticket_index: block.ticket_index,
                block: block.block.0,
                generation: block.generation.0,
                layer_begin: block.layer_begin,
                layer_end: block.layer_end,
                checksum: block.checksum,
                data: block.data,
            }),
            KvFrame::Last(last) => Frame::Last(v1::Last {
                transfer_id: id_to_wire(last.transfer.0),
                request_id: id_to_wire(last.request.0),
                attempt: last.attempt.0,
                block_count: last.block_count,
                frame_count: last.frame_count,
                first_tokens: last.first_tokens.into_iter().map(Into::into).collect(),
                traceparent: last.traceparent.unwrap_or_default(),
                cached_tokens: last.cached_tokens,
            }),
            KvFrame::Abort { transfer, reason } => Frame::Abort(v1::Abort {
                transfer_id: id_to_wire(transfer.0),
                reason,
            }),
        };
        Self { frame: Some(frame) }
    }
}

impl TryFrom<v1::KvFrame> for KvFrame {
    type Error = ConvertError;
    fn try_from(wire: v1::KvFrame) -> Result<Self> {
        use v1::kv_frame::Frame;
        Ok(match required(wire.frame, "kv_frame")? {
            Frame::Hello(hello) => KvFrame::Hello(hello_from_wire(hello)?),
            Frame::Begin(begin) => KvFrame::Begin {
                transfer: transfer_id(&begin.transfer_id, "begin.transfer_id")?,
            },
            Frame::Block(block) => KvFrame::Block(block_from_wire(block)?),
            Frame::Last(last) => KvFrame::Last(LastFrame {
                transfer: transfer_id(&last.transfer_id, "last.transfer_id")?,
                request: request_id(&last.request_id, "last.request_id")?,
                attempt: Attempt(last.attempt),
                block_count: last.block_count,
                frame_count: last.frame_count,
                first_tokens: tokens_from_wire(last.first_tokens, "last.first_tokens")?,
                // A text that is no context counts as none. No transfer fails because of its trace.
                traceparent: Some(last.traceparent).filter(|text| (1..=TRACEPARENT_BYTES_MAX).contains(&text.len())),
                cached_tokens: last.cached_tokens,
            }),
            Frame::Abort(abort) => KvFrame::Abort {
                transfer: transfer_id(&abort.transfer_id, "abort.transfer_id")?,
                reason: name(abort.reason, "abort.reason")?,
            },
        })
    }
}

fn hello_to_wire(hello: Hello) -> v1::Hello {
    let (compatibility_hash, compatibility_facts) = compatibility::to_wire(hello.compatibility);
    v1::Hello {
        from: Some(node_ref(hello.from)),
        to: Some(node_ref(hello.to)),
        protocol_version: hello.protocol_version,
        compatibility_hash,
        compatibility_facts,
        shard: Some(v1::KvShard {
            rank: hello.shard.rank,
            rank_count: hello.shard.rank_count,
            heads: hello.shard.heads.map(|heads| v1::HeadRange {
                begin: heads.start,
                end: heads.end,
            }),
        }),
    }
}

fn hello_from_wire(wire: v1::Hello) -> Result<Hello> {
    let told = (&wire.compatibility_hash[..], wire.compatibility_facts);
    Ok(Hello {
        from: node_id(wire.from, "hello.from")?,
        to: node_id(wire.to, "hello.to")?,
        protocol_version: wire.protocol_version,
        compatibility: compatibility::from_wire(told, "hello.compatibility_hash")?,
        shard: wire.shard.map_or(KvShard::WHOLE, |shard| KvShard {
            rank: shard.rank,
            rank_count: shard.rank_count,
            heads: shard.heads.map(|heads| heads.begin..heads.end),
        }),
    })
}

fn block_from_wire(wire: v1::KvBlock) -> Result<KvBlockFrame> {
    if wire.layer_begin >= wire.layer_end {
        return Err(ConvertError::OutOfRange {
            field: "block.layer_end",
            value: wire.layer_end.to_string(),
            allowed: "above layer_begin",
        });
    }
    Ok(KvBlockFrame {
        transfer: transfer_id(&wire.transfer_id, "block.transfer_id")?,
        sequence_no: wire.sequence_no,
        ticket_index: wire.ticket_index,
        block: BlockId(wire.block),
        generation: Generation(wire.generation),
        layer_begin: wire.layer_begin,
        layer_end: wire.layer_end,
        checksum: wire.checksum,
        data: wire.data,
    })
}

impl From<KvReply> for v1::KvReply {
    fn from(reply: KvReply) -> Self {
        use v1::kv_reply::Reply;
        let reply = match reply {
            KvReply::Hello(hello) => {
                let (reason, text) = hello.refused.map_or_else(Default::default, |refused| {
                    (refused.reason.name().to_owned(), detail(&refused.detail))
                });
                Reply::Hello(v1::HelloReply {
                    node: Some(node_ref(hello.node)),
                    accepted: reason.is_empty(),
                    reason,
                    detail: text,
                    offers: hello.offers.into_iter().map(Into::into).collect(),
                })
            }
            KvReply::Ack { transfer } => Reply::Ack(v1::Ack {
                transfer_id: id_to_wire(transfer.0),
            }),
            KvReply::Refused {
                transfer,
                reason,
                detail: text,
            } => Reply::Refused(v1::TransferRefused {
                transfer_id: id_to_wire(transfer.0),
                reason,
                detail: detail(&text),
            }),
            KvReply::Aborted { transfer, reason } => Reply::Aborted(v1::Aborted {
                transfer_id: id_to_wire(transfer.0),
                reason,
            }),
        };
        Self { reply: Some(reply) }
    }
}

impl TryFrom<v1::KvReply> for KvReply {
    type Error = ConvertError;
    fn try_from(wire: v1::KvReply) -> Result<Self> {
        use v1::kv_reply::Reply;
        Ok(match required(wire.reply, "kv_reply")? {
            Reply::Hello(hello) => KvReply::Hello(hello_reply(hello)?),
            Reply::Ack(ack) => KvReply::Ack {
                transfer: transfer_id(&ack.transfer_id, "ack.transfer_id")?,
            },
            Reply::Refused(refused) => KvReply::Refused {
                transfer: transfer_id(&refused.transfer_id, "refused.transfer_id")?,
                reason: name(refused.reason, "refused.reason")?,
                detail: detail(&refused.detail),
            },
            Reply::Aborted(aborted) => KvReply::Aborted {
                transfer: transfer_id(&aborted.transfer_id, "aborted.transfer_id")?,
                reason: name(aborted.reason, "aborted.reason")?,
            },
        })
    }
}

impl From<TransportOffer> for v1::TransportOffer {
    fn from(TransportOffer { transport, offer }: TransportOffer) -> Self {
        Self { transport, offer }
    }
}

fn hello_reply(wire: v1::HelloReply) -> Result<HelloReply> {
    let node: NodeId = node_id(wire.node, "hello.node")?;
    let refused = match wire.accepted {
        true => None,
        false => Some(HelloRefused {
            reason: hello_refused_reason(&wire.reason)?,
            detail: detail(&wire.detail),
        }),
    };
    let offer = |wire: v1::TransportOffer| match wire.offer.len() {
        0..=TRANSPORT_OFFER_BYTES_MAX => Ok(TransportOffer {
            transport: name(wire.transport, "hello.offers.transport")?,
            offer: wire.offer,
        }),
        bytes => Err(ConvertError::OutOfRange {
            field: "hello.offers.offer",
            value: format!("{bytes} bytes"),
            allowed: "at most 4096 bytes",
        }),
    };
    let offers = at_most(wire.offers, SMALL_LIST_MAX, "hello.offers")?;
    Ok(HelloReply {
        node,
        refused,
        offers: offers.into_iter().map(offer).collect::<Result<_>>()?,
    })
}

fn hello_refused_reason(label: &str) -> Result<HelloRefusedReason> {
    let mut known = HelloRefusedReason::ALL.iter().copied();
    known
        .find(|reason| reason.name() == label)
        .ok_or_else(|| ConvertError::OutOfRange {
            field: "hello.reason",
            value: detail(label),
            allowed: "a reason of this protocol version",
        })
}

impl From<StagedFrame> for v1::StagedFrame {
    fn from(staged: StagedFrame) -> Self {
        let (frame, data) = match staged {
            StagedFrame::Control(frame) => (Some(frame), None),
            StagedFrame::Block(block) => {
                let (slot, bytes) = (block.slot, block.data_bytes);
                (Some(KvFrame::Block(block.header)), Some(v1::StagedData { slot, bytes }))
            }
            StagedFrame::Goodbye => (None, None),
        };
        Self {
            goodbye: frame.is_none(),
            frame: frame.map(Into::into),
            data,
        }
    }
}

impl TryFrom<v1::StagedFrame> for StagedFrame {
    type Error = ConvertError;
    fn try_from(wire: v1::StagedFrame) -> Result<Self> {
        if wire.goodbye && wire.frame.is_none() && wire.data.is_none() {
            return Ok(StagedFrame::Goodbye);
        }
        let frame = KvFrame::try_from(required(wire.frame, "staged.frame")?)?;
        match (frame, wire.data) {
            (KvFrame::Block(header), Some(data)) if header.data.is_empty() => Ok(StagedFrame::Block(StagedBlock {
                header,
                slot: data.slot,
                data_bytes: data.bytes,
            })),
            (KvFrame::Block(header), data) => Err(ConvertError::OutOfRange {
                field: "staged.data",
                value: format!("{} bytes inline, a slot: {}", header.data.len(), data.is_some()),
                allowed: "a slot, and nothing inline",
            }),
            (_, Some(data)) => Err(ConvertError::OutOfRange {
                field: "staged.data",
                value: format!("slot {}", data.slot),
                allowed: "none without a block",
            }),
            (_, None) if wire.goodbye => Err(ConvertError::OutOfRange {
                field: "staged.goodbye",
                value: "true".to_owned(),
                allowed: "alone",
            }),
            (frame, None) => Ok(StagedFrame::Control(frame)),
        }
    }
}

impl From<StagedReply> for v1::StagedReply {
    fn from(staged: StagedReply) -> Self {
        use v1::staged_reply::Reply;
        let reply = match staged {
            StagedReply::Reply(reply) => Reply::KvReply(reply.into()),
            StagedReply::ReturnedSlot(slot) => Reply::ReturnedSlot(slot),
            StagedReply::Begun(transfer) => Reply::BegunTransfer(id_to_wire(transfer.0)),
        };
        Self { reply: Some(reply) }
    }
}

impl TryFrom<v1::StagedReply> for StagedReply {
    type Error = ConvertError;
    fn try_from(wire: v1::StagedReply) -> Result<Self> {
        use v1::staged_reply::Reply;
        Ok(match required(wire.reply, "staged_reply")? {
            Reply::KvReply(reply) => StagedReply::Reply(reply.try_into()?),
            Reply::ReturnedSlot(slot) => StagedReply::ReturnedSlot(slot),
            Reply::BegunTransfer(transfer) => StagedReply::Begun(transfer_id(&transfer, "staged.begun_transfer")?),
        })
    }
}
