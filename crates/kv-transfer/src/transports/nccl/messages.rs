//! The messages of a control stream, which is a method of the handoff service: the frames and replies of every pair, and what
//! a communicator needs. The bytes of blocks are in none of them.

use bytes::Bytes;
use proto::messages::{KvBlockFrame, KvFrame, KvReply};
use proto::v1;
use thiserror::Error;

use super::group::{Group, RingShape};
use super::library::{CommunicatorId, ID_BYTES};

/// gRPC's path of the method.
pub(super) const PATH: &str = "/baton.v1.HandoffService/PushByNccl";
/// Largest message: an exchange of 512 frames has 512 headers of at most 150 bytes, and a last frame the first tokens of every
/// choice.
pub(super) const MESSAGE_BYTES_MAX: usize = 256 << 10;

/// What a decode node says about NCCL in the answer to a hello.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct NcclOffer {
    /// As the decode node's library says it.
    #[prost(string, tag = "1")]
    pub version: String,
    /// The ring that it gives each sender.
    #[prost(uint32, tag = "2")]
    pub slots: u32,
    #[prost(uint32, tag = "3")]
    pub slot_bytes: u32,
    #[prost(bool, tag = "4")]
    pub has_checksums: bool,
}

impl NcclOffer {
    pub fn ring(&self) -> RingShape {
        RingShape {
            slots: self.slots,
            slot_bytes: self.slot_bytes,
        }
    }
}

/// P -> D. One field is set.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ToDecodeWire {
    /// Anything but a block.
    #[prost(message, optional, tag = "1")]
    frame: Option<v1::KvFrame>,
    /// The pair is wanted: mint an id.
    #[prost(bool, tag = "2")]
    want: bool,
    /// An exchange. The sender posts it after this message, the receiver when it reads this message.
    #[prost(message, optional, tag = "3")]
    group: Option<GroupWire>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct GroupWire {
    #[prost(message, repeated, tag = "1")]
    blocks: Vec<BlockWire>,
    #[prost(uint32, repeated, tag = "2")]
    run_bytes: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct BlockWire {
    /// A block without its data.
    #[prost(message, optional, tag = "1")]
    header: Option<v1::KvFrame>,
    #[prost(uint32, tag = "2")]
    data_bytes: u32,
}

/// D -> P. One field is set.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ToPrefillWire {
    #[prost(message, optional, tag = "1")]
    reply: Option<v1::KvReply>,
    /// The id of the communicator.
    #[prost(bytes = "bytes", tag = "2")]
    id: Bytes,
    /// The decode node's rank is made.
    #[prost(bool, tag = "3")]
    is_ready: bool,
    /// An exchange has landed: its frames have been taken or refused, and the next one may come.
    #[prost(bool, tag = "4")]
    has_landed: bool,
    /// The communicator has ended, for people. The stream ends next.
    #[prost(string, tag = "5")]
    ended: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum ToDecode {
    Frame(KvFrame),
    Want,
    Group(Group),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum ToPrefill {
    Reply(KvReply),
    Id(CommunicatorId),
    Ready,
    Landed,
    Ended(String),
}

/// The peer breaks the contract.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum BadMessage {
    #[error("a message says nothing")]
    Empty,
    #[error("an id has another length")]
    Id,
    #[error("a block's header is none")]
    Header,
    #[error("a block came outside an exchange")]
    Block,
    #[error("{0}")]
    Form(String),
}

impl From<ToDecode> for ToDecodeWire {
    fn from(message: ToDecode) -> Self {
        match message {
            ToDecode::Frame(frame) => Self {
                frame: Some(frame.into()),
                ..Self::default()
            },
            ToDecode::Want => Self {
                want: true,
                ..Self::default()
            },
            ToDecode::Group(group) => Self {
                group: Some(group.into()),
                ..Self::default()
            },
        }
    }
}

impl From<Group> for GroupWire {
    fn from(group: Group) -> Self {
        let block = |(header, data_bytes)| BlockWire {
            header: Some(KvFrame::Block(header).into()),
            data_bytes,
        };
        Self {
            blocks: group.blocks.into_iter().map(block).collect(),
            run_bytes: group.run_bytes,
        }
    }
}

impl TryFrom<ToDecodeWire> for ToDecode {
    type Error = BadMessage;
    fn try_from(wire: ToDecodeWire) -> Result<Self, BadMessage> {
        match (wire.frame, wire.want, wire.group) {
            (Some(frame), _, _) => match frame_of(frame)? {
                KvFrame::Block(_) => Err(BadMessage::Block),
                frame => Ok(ToDecode::Frame(frame)),
            },
            (None, true, _) => Ok(ToDecode::Want),
            (None, false, Some(group)) => {
                let blocks = group.blocks.into_iter().map(block_of).collect::<Result<_, _>>()?;
                Ok(ToDecode::Group(Group {
                    blocks,
                    run_bytes: group.run_bytes,
                }))
            }
            (None, false, None) => Err(BadMessage::Empty),
        }
    }
}

fn frame_of(wire: v1::KvFrame) -> Result<KvFrame, BadMessage> {
    KvFrame::try_from(wire).map_err(|error| BadMessage::Form(error.to_string()))
}

fn block_of(wire: BlockWire) -> Result<(KvBlockFrame, u32), BadMessage> {
    match frame_of(wire.header.ok_or(BadMessage::Header)?)? {
        KvFrame::Block(header) if header.data.is_empty() => Ok((header, wire.data_bytes)),
        _ => Err(BadMessage::Header),
    }
}

impl From<ToPrefill> for ToPrefillWire {
    fn from(message: ToPrefill) -> Self {
        let nothing = Self::default();
        match message {
            ToPrefill::Reply(reply) => Self {
                reply: Some(reply.into()),
                ..nothing
            },
            ToPrefill::Id(id) => Self {
                id: Bytes::copy_from_slice(&id.0),
                ..nothing
            },
            ToPrefill::Ready => Self {
                is_ready: true,
                ..nothing
            },
            ToPrefill::Landed => Self {
                has_landed: true,
                ..nothing
            },
            ToPrefill::Ended(ended) => Self { ended, ..nothing },
        }
    }
}

impl TryFrom<ToPrefillWire> for ToPrefill {
    type Error = BadMessage;
    fn try_from(wire: ToPrefillWire) -> Result<Self, BadMessage> {
        if let Some(reply) = wire.reply {
            let reply = KvReply::try_from(reply).map_err(|error| BadMessage::Form(error.to_string()))?;
            return Ok(ToPrefill::Reply(reply));
        }
        match wire {
            wire if !wire.ended.is_empty() => Ok(ToPrefill::Ended(wire.ended)),
            wire if wire.is_ready => Ok(ToPrefill::Ready),
            wire if wire.has_landed => Ok(ToPrefill::Landed),
            wire if wire.id.is_empty() => Err(BadMessage::Empty),
            wire => {
                let id = <[u8; ID_BYTES]>::try_from(&wire.id[..]).map_err(|_| BadMessage::Id)?;
                Ok(ToPrefill::Id(CommunicatorId(id)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use serving_core::ids::{BlockId, Generation, TransferId};

    use super::*;

    fn header() -> KvBlockFrame {
        KvBlockFrame {
            transfer: TransferId(3),
            sequence_no: 4,
            ticket_index: 5,
            block: BlockId(6),
            generation: Generation(7),
            layer_begin: 0,
            layer_end: 2,
            checksum: 8,
            data: Bytes::new(),
        }
    }

    #[test]
    fn every_message_survives() {
        let begin = KvFrame::Begin {
            transfer: TransferId(1),
        };
        let group = Group {
            blocks: vec![(header(), 10), (header(), 20)],
            run_bytes: vec![30],
        };
        for message in [ToDecode::Frame(begin), ToDecode::Want, ToDecode::Group(group)] {
            let bytes = ToDecodeWire::from(message.clone()).encode_to_vec();
            let wire = ToDecodeWire::decode(&bytes[..]).unwrap();
            assert_eq!(ToDecode::try_from(wire), Ok(message));
        }
        let ack = KvReply::Ack {
            transfer: TransferId(1),
        };
        for message in [
            ToPrefill::Reply(ack),
            ToPrefill::Id(CommunicatorId([9; ID_BYTES])),
            ToPrefill::Ready,
            ToPrefill::Landed,
            ToPrefill::Ended("a test".to_owned()),
        ] {
            let bytes = ToPrefillWire::from(message.clone()).encode_to_vec();
            let wire = ToPrefillWire::decode(&bytes[..]).unwrap();
            assert_eq!(ToPrefill::try_from(wire), Ok(message));
        }
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        assert_eq!(ToDecode::try_from(ToDecodeWire::default()), Err(BadMessage::Empty));
        assert_eq!(ToPrefill::try_from(ToPrefillWire::default()), Err(BadMessage::Empty));
        let short = ToPrefillWire {
            id: Bytes::from_static(&[1; 127]),
            ..ToPrefillWire::default()
        };
        assert_eq!(ToPrefill::try_from(short), Err(BadMessage::Id));
        let block = ToDecodeWire {
            frame: Some(KvFrame::Block(header()).into()),
            ..ToDecodeWire::default()
        };
        assert_eq!(ToDecode::try_from(block), Err(BadMessage::Block));
        let no_header = ToDecodeWire {
            group: Some(GroupWire {
                blocks: vec![BlockWire::default()],
                run_bytes: Vec::new(),
            }),
            ..ToDecodeWire::default()
        };
        assert_eq!(ToDecode::try_from(no_header), Err(BadMessage::Header));
    }
}
