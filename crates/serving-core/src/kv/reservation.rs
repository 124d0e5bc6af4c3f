//! The receiver's ledger of one transfer: every frame and the final count are checked against what was promised.

use std::ops::Range;

use thiserror::Error;

use crate::ids::{BlockId, Generation, NodeId, TransferId};
use crate::request::AttemptKey;

/// What the decode node reserved, in the terms frames are checked in.
#[derive(Clone, Debug)]
pub struct Reservation {
    pub transfer: TransferId,
    pub key: AttemptKey,
    /// The only node that may write.
    pub sender: NodeId,
    /// Blocks past the prefix, in sequence order.
    pub blocks: Vec<(BlockId, Generation)>,
    pub layer_count: u32,
    /// Bytes of one (block, layer).
    pub layer_bytes: usize,
}

/// Header of one KV frame, as the peer states it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub sequence_no: u32,
    pub ticket_index: u32,
    pub block: BlockId,
    pub generation: Generation,
    pub layers: Range<u32>,
    pub data_bytes: usize,
}

/// The promise of the last frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastHeader {
    pub key: AttemptKey,
    pub block_count: u32,
    pub frame_count: u32,
}

/// Why a frame was refused: always the peer's fault, never worth a retry of the same transfer. The transfer ends here.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LedgerError {
    #[error("the frame comes from node {got}, the ticket names {expected}")]
    WrongSender { expected: NodeId, got: NodeId },
    #[error("frame number {got} came where {expected} was due: a frame was lost, repeated or reordered")]
    SequenceGap { expected: u32, got: u32 },
    #[error("ticket index {got} is outside the ticket's {blocks} blocks")]
    NoSuchTicketBlock { got: u32, blocks: u32 },
    #[error("the frame names block {got}, ticket place {ticket_index} is block {expected}")]
    WrongBlock {
        ticket_index: u32,
        expected: BlockId,
        got: BlockId,
    },
    #[error("block {block} is in generation {expected}, the frame writes generation {got}")]
    StaleGeneration {
        block: BlockId,
        expected: Generation,
        got: Generation,
    },
    #[error("layers {}..{} of block {block} came where layer {expected} of {layer_count} was due", .got.start, .got.end)]
    WrongLayers {
        block: BlockId,
        expected: u32,
        got: Range<u32>,
        layer_count: u32,
    },
    #[error("the frame carries {got} bytes, its layers are {expected}")]
    WrongSize { expected: usize, got: usize },
    #[error("the last frame is for another request than the ticket")]
    WrongRequest { expected: AttemptKey, got: AttemptKey },
    #[error("the sender counts {got} blocks, the ticket has {expected}")]
    WrongBlockCount { expected: u32, got: u32 },
    #[error("the sender counts {got} frames, {landed} have landed")]
    WrongFrameCount { landed: u32, got: u32 },
    #[error("block {block} is incomplete: {layers} of {layer_count} layers have landed")]
    IncompleteBlock {
        block: BlockId,
        layers: u32,
        layer_count: u32,
    },
    #[error("the transfer was already ended")]
    Ended,
}

impl LedgerError {
    /// Every [`LedgerError::name`].
    pub const NAMES: [&'static str; 12] = [
        "wrong_sender",
        "sequence_gap",
        "no_such_ticket_block",
        "wrong_block",
        "stale_generation",
        "wrong_layers",
        "wrong_size",
        "wrong_request",
        "wrong_block_count",
        "wrong_frame_count",
        "incomplete_block",
        "ended",
    ];

    /// Closed label for metrics and the wire.
    pub fn name(&self) -> &'static str {
        match self {
            LedgerError::WrongSender { .. } => "wrong_sender",
            LedgerError::SequenceGap { .. } => "sequence_gap",
            LedgerError::NoSuchTicketBlock { .. } => "no_such_ticket_block",
            LedgerError::WrongBlock { .. } => "wrong_block",
            LedgerError::StaleGeneration { .. } => "stale_generation",
            LedgerError::WrongLayers { .. } => "wrong_layers",
            LedgerError::WrongSize { .. } => "wrong_size",
            LedgerError::WrongRequest { .. } => "wrong_request",
            LedgerError::WrongBlockCount { .. } => "wrong_block_count",
            LedgerError::WrongFrameCount { .. } => "wrong_frame_count",
            LedgerError::IncompleteBlock { .. } => "incomplete_block",
            LedgerError::Ended => "ended",
        }
    }
}

/// Progress of one transfer. `admit` a frame before its bytes are looked at, call `landed` when they are in place.
#[derive(Debug)]
pub struct ReservationLedger {
    reservation: Reservation,
    /// Layers announced so far, per ticket block: they come in ascending order without gaps.
    next_layer: Vec<u32>,
    next_sequence_no: u32,
    landed_frames: u32,
    is_ended: bool,
}

impl ReservationLedger {
    pub fn new(reservation: Reservation) -> Self {
        let next_layer = vec![0; reservation.blocks.len()];
        Self {
            reservation,
            next_layer,
            next_sequence_no: 0,
            landed_frames: 0,
            is_ended: false,
        }
    }

    pub fn reservation(&self) -> &Reservation {
        &self.reservation
    }
    pub fn landed_frames(&self) -> u32 {
        self.landed_frames
    }

    /// Checks who sends.
    pub fn check_sender(&self, sender: &NodeId) -> Result<(), LedgerError> {
        if *sender == self.reservation.sender {
            return Ok(());
        }
        Err(LedgerError::WrongSender {
            expected: self.reservation.sender.clone(),
            got: sender.clone(),
        })
    }

    /// Checks a frame's header against the reservation. After an error the ledger takes no further frame.
    pub fn admit(&mut self, frame: &FrameHeader) -> Result<(), LedgerError> {
        let checked = self.check_frame(frame);
        match &checked {
            Ok(()) => {
                self.next_sequence_no = self.next_sequence_no.saturating_add(1);
                self.next_layer[frame.ticket_index as usize] = frame.layers.end;
            }
            Err(_) => self.is_ended = true,
        }
        checked
    }

    /// The bytes of one admitted frame have been verified and copied to their block.
    pub fn landed(&mut self) {
        self.landed_frames = self.landed_frames.saturating_add(1);
    }

    /// Checks the last frame: what landed must equal what was promised. Ends the ledger either way.
    pub fn finish(&mut self, last: &LastHeader) -> Result<(), LedgerError> {
        let checked = self.check_last(last);
        self.is_ended = true;
        checked
    }

    fn check_frame(&self, frame: &FrameHeader) -> Result<(), LedgerError> {
        if self.is_ended {
            return Err(LedgerError::Ended);
        }
        if frame.sequence_no != self.next_sequence_no {
            return Err(LedgerError::SequenceGap {
                expected: self.next_sequence_no,
                got: frame.sequence_no,
            });
        }
        let Some((block, generation)) = self.reservation.blocks.get(frame.ticket_index as usize).copied() else {
            let blocks = u32::try_from(self.reservation.blocks.len()).unwrap_or(u32::MAX);
            return Err(LedgerError::NoSuchTicketBlock {
                got: frame.ticket_index,
                blocks,
            });
        };
        if frame.block != block {
            let (ticket_index, expected, got) = (frame.ticket_index, block, frame.block);
            return Err(LedgerError::WrongBlock {
                ticket_index,
                expected,
                got,
            });
        }
        if frame.generation != generation {
            return Err(LedgerError::StaleGeneration {
                block,
                expected: generation,
                got: frame.generation,
            });
        }
        let expected = self.next_layer[frame.ticket_index as usize];
        let layer_count = self.reservation.layer_count;
        if frame.layers.start != expected || frame.layers.end <= expected || frame.layers.end > layer_count {
            return Err(LedgerError::WrongLayers {
                block,
                expected,
                got: frame.layers.clone(),
                layer_count,
            });
        }
        let bytes = frame.layers.len() * self.reservation.layer_bytes;
        if frame.data_bytes != bytes {
            return Err(LedgerError::WrongSize {
                expected: bytes,
                got: frame.data_bytes,
            });
        }
        Ok(())
    }

    fn check_last(&self, last: &LastHeader) -> Result<(), LedgerError> {
        if self.is_ended {
            return Err(LedgerError::Ended);
        }
        if last.key != self.reservation.key {
            return Err(LedgerError::WrongRequest {
                expected: self.reservation.key,
                got: last.key,
            });
        }
        let blocks = u32::try_from(self.reservation.blocks.len()).unwrap_or(u32::MAX);
        if last.block_count != blocks {
            return Err(LedgerError::WrongBlockCount {
                expected: blocks,
                got: last.block_count,
            });
        }
        if last.frame_count != self.landed_frames || self.landed_frames != self.next_sequence_no {
            return Err(LedgerError::WrongFrameCount {
                landed: self.landed_frames,
                got: last.frame_count,
            });
        }
        let layer_count = self.reservation.layer_count;
        for (layers, (block, _)) in self.next_layer.iter().zip(&self.reservation.blocks) {
            if *layers != layer_count {
                return Err(LedgerError::IncompleteBlock {
                    block: *block,
                    layers: *layers,
                    layer_count,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Attempt, NodeEpoch, NodeName, RequestId};

    fn sender(epoch: u64) -> NodeId {
        NodeId {
            name: NodeName::new("prefill-0"),
            epoch: NodeEpoch(epoch),
        }
    }

    fn ledger() -> ReservationLedger {
        ReservationLedger::new(Reservation {
            transfer: TransferId(9),
            key: key(1),
            sender: sender(1),
            blocks: vec![(BlockId(4), Generation(2)), (BlockId(7), Generation(1))],
            layer_count: 4,
            layer_bytes: 10,
        })
    }

    fn key(request: u128) -> AttemptKey {
        AttemptKey {
            request: RequestId(request),
            attempt: Attempt(0),
        }
    }

    fn frame(sequence_no: u32, ticket_index: u32) -> FrameHeader {
        let (block, generation) = [(BlockId(4), Generation(2)), (BlockId(7), Generation(1))][ticket_index as usize];
        FrameHeader {
            sequence_no,
            ticket_index,
            block,
            generation,
            layers: 0..4,
            data_bytes: 40,
        }
    }

    fn last() -> LastHeader {
        LastHeader {
            key: key(1),
            block_count: 2,
            frame_count: 2,
        }
    }

    #[test]
    fn takes_a_whole_transfer_and_nothing_after_it() {
        let mut ledger = ledger();
        for (sequence_no, index) in [(0, 1), (1, 0)] {
            ledger.admit(&frame(sequence_no, index)).expect("as promised");
            ledger.landed();
        }
        ledger.finish(&last()).expect("complete");
        assert_eq!(ledger.admit(&frame(2, 0)), Err(LedgerError::Ended));
    }

    #[test]
    fn refuses_each_broken_frame_for_its_own_reason() {
        let cases: Vec<(FrameHeader, &str)> = vec![
            (frame(1, 0), "sequence_gap"),
            (
                FrameHeader {
                    ticket_index: 2,
                    ..frame(0, 0)
                },
                "no_such_ticket_block",
            ),
            (
                FrameHeader {
                    block: BlockId(5),
                    ..frame(0, 0)
                },
                "wrong_block",
            ),
            (
                FrameHeader {
                    generation: Generation(1),
                    ..frame(0, 0)
                },
                "stale_generation",
            ),
            (
                FrameHeader {
                    layers: 1..4,
                    data_bytes: 30,
                    ..frame(0, 0)
                },
                "wrong_layers",
            ),
            (
                FrameHeader {
                    layers: 0..5,
                    data_bytes: 50,
                    ..frame(0, 0)
                },
                "wrong_layers",
            ),
            (
                FrameHeader {
                    layers: 0..0,
                    data_bytes: 0,
                    ..frame(0, 0)
                },
                "wrong_layers",
            ),
            (
                FrameHeader {
                    data_bytes: 41,
                    ..frame(0, 0)
                },
                "wrong_size",
            ),
        ];
        for (broken, label) in cases {
            let mut ledger = ledger();
            assert_eq!(
                ledger.admit(&broken).map_err(|error| error.name()),
                Err(label),
                "{broken:?}"
            );
            assert_eq!(ledger.admit(&frame(0, 0)), Err(LedgerError::Ended), "no second chance");
        }
        assert_eq!(
            ledger().check_sender(&sender(2)).map_err(|error| error.name()),
            Err("wrong_sender")
        );
    }

    #[test]
    fn refuses_a_last_frame_that_does_not_add_up() {
        let complete = |landed: u32| {
            let mut ledger = ledger();
            for index in 0..2 {
                ledger.admit(&frame(index, index)).expect("as promised");
                if index < landed {
                    ledger.landed();
                }
            }
            ledger
        };
        let cases = [
            (complete(2), LastHeader { key: key(2), ..last() }, "wrong_request"),
            (
                complete(2),
                LastHeader {
                    block_count: 1,
                    ..last()
                },
                "wrong_block_count",
            ),
            (
                complete(2),
                LastHeader {
                    frame_count: 3,
                    ..last()
                },
                "wrong_frame_count",
            ),
            (
                complete(1),
                LastHeader {
                    frame_count: 1,
                    ..last()
                },
                "wrong_frame_count",
            ),
        ];
        for (mut ledger, last, label) in cases {
            assert_eq!(ledger.finish(&last).map_err(|error| error.name()), Err(label));
        }
        let mut half = ledger();
        half.admit(&frame(0, 0)).expect("as promised");
        half.landed();
        let short = LastHeader {
            frame_count: 1,
            ..last()
        };
        assert_eq!(
            half.finish(&short).map_err(|error| error.name()),
            Err("incomplete_block")
        );
    }
}
