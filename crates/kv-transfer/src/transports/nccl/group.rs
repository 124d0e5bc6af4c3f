//! What travels in one exchange: whole frames, packed into runs. Both ends take the same sizes in the same order from one message
//! of the control stream, so they name an exchange alike.

use proto::messages::KvBlockFrame;
use thiserror::Error;

use crate::span::DeviceAddress;

/// Frames in one exchange. NCCL slows down with thousands of pieces (nccl issue 1398); packed, these are far fewer.
pub(super) const FRAMES_MAX: usize = 512;
/// No ring has more slots than this, whatever a peer announces.
const SLOTS_MAX: u32 = 4096;
/// No ring is larger than this, whatever a peer announces.
const RING_BYTES_MAX: u64 = 1 << 30;

/// Contiguous bytes that are one piece of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub at: DeviceAddress,
    pub bytes: usize,
}

/// How a ring in the memory of a device is divided. The decode node decides: it bounds what is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingShape {
    pub slots: u32,
    pub slot_bytes: u32,
}

impl RingShape {
    pub fn bytes(self) -> u64 {
        u64::from(self.slots) * u64::from(self.slot_bytes)
    }

    pub fn is_sound(self) -> bool {
        (1..=SLOTS_MAX).contains(&self.slots) && self.slot_bytes > 0 && self.bytes() <= RING_BYTES_MAX
    }
}

/// Joins parts that lie one behind the other. Empty parts vanish.
pub(super) fn packed(parts: impl Iterator<Item = Run>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for part in parts.filter(|part| part.bytes > 0) {
        match runs.last_mut() {
            Some(run) if run.at.offset(run.bytes) == part.at => run.bytes += part.bytes,
            _ => runs.push(part),
        }
    }
    runs
}

/// The receiver's end: the same sizes, one behind the other.
pub(super) fn unpacked(start: DeviceAddress, run_bytes: &[u32]) -> Vec<Run> {
    let mut at = start;
    let run = |bytes: &u32| {
        let run = Run {
            at,
            bytes: *bytes as usize,
        };
        at = at.offset(run.bytes);
        run
    };
    run_bytes.iter().map(run).collect()
}

/// The announcement of one exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// With the bytes of each.
    pub blocks: Vec<(KvBlockFrame, u32)>,
    pub run_bytes: Vec<u32>,
}

/// The sender breaks the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum BadGroup {
    #[error("an exchange of no frame, or of too many")]
    Frames,
    #[error("the runs of an exchange are empty, or more than its frames")]
    Runs,
    #[error("the runs of an exchange are not as long as its frames")]
    Lengths,
    #[error("an exchange is larger than the ring")]
    TooLarge,
}

impl Group {
    pub fn bytes(&self) -> u64 {
        self.run_bytes.iter().map(|bytes| u64::from(*bytes)).sum()
    }

    /// Whether it can be received into a ring of this shape. What each frame may write is the ledger's to decide, afterwards.
    pub fn check(&self, ring: RingShape) -> Result<(), BadGroup> {
        let frame_bytes: u64 = self.blocks.iter().map(|(_, bytes)| u64::from(*bytes)).sum();
        if self.blocks.is_empty() || self.blocks.len() > FRAMES_MAX {
            return Err(BadGroup::Frames);
        }
        if self.run_bytes.contains(&0) || self.run_bytes.len() > self.blocks.len() {
            return Err(BadGroup::Runs);
        }
        if self.bytes() != frame_bytes {
            return Err(BadGroup::Lengths);
        }
        match self.bytes() <= ring.bytes() {
            true => Ok(()),
            false => Err(BadGroup::TooLarge),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serving_core::ids::{BlockId, Generation, TransferId};

    use super::*;

    fn run(at: u64, bytes: usize) -> Run {
        let at = DeviceAddress(at);
        Run { at, bytes }
    }

    fn group(frames: &[u32], runs: &[u32]) -> Group {
        let header = KvBlockFrame {
            transfer: TransferId(1),
            sequence_no: 0,
            ticket_index: 0,
            block: BlockId(0),
            generation: Generation(0),
            layer_begin: 0,
            layer_end: 1,
            checksum: 0,
            data: Bytes::new(),
        };
        Group {
            blocks: frames.iter().map(|bytes| (header.clone(), *bytes)).collect(),
            run_bytes: runs.to_vec(),
        }
    }

    #[test]
    fn neighbours_are_one_run_and_the_receiver_has_the_same_sizes() {
        let parts = [
            run(100, 10),
            run(110, 10),
            run(130, 5),
            run(135, 0),
            run(135, 1),
            run(100, 2),
        ];
        let runs = packed(parts.into_iter());
        assert_eq!(runs, [run(100, 20), run(130, 6), run(100, 2)]);
        let sizes: Vec<u32> = runs.iter().map(|run| run.bytes as u32).collect();
        assert_eq!(unpacked(DeviceAddress(7), &sizes), [run(7, 20), run(27, 6), run(33, 2)]);
    }

    #[test]
    fn only_a_group_that_fits_the_ring_is_received() {
        let ring = RingShape {
            slots: 2,
            slot_bytes: 8,
        };
        assert_eq!(group(&[8, 8], &[16]).check(ring), Ok(()));
        assert_eq!(group(&[8, 0], &[8]).check(ring), Ok(()));
        assert_eq!(group(&[], &[]).check(ring), Err(BadGroup::Frames));
        assert_eq!(group(&[1; FRAMES_MAX + 1], &[]).check(ring), Err(BadGroup::Frames));
        assert_eq!(group(&[8], &[0, 8]).check(ring), Err(BadGroup::Runs));
        assert_eq!(group(&[8], &[4, 4]).check(ring), Err(BadGroup::Runs));
        assert_eq!(group(&[8, 8], &[15]).check(ring), Err(BadGroup::Lengths));
        assert_eq!(
            group(&[u32::MAX, u32::MAX], &[u32::MAX, u32::MAX]).check(ring),
            Err(BadGroup::TooLarge)
        );
    }

    #[test]
    fn a_ring_of_no_slots_or_of_absurd_size_is_not_sound() {
        let shape = |slots, slot_bytes| RingShape { slots, slot_bytes };
        assert!(shape(16, 2 << 20).is_sound());
        for bad in [shape(0, 1), shape(1, 0), shape(4097, 1), shape(4096, u32::MAX)] {
            assert!(!bad.is_sound(), "{bad:?}");
        }
    }
}
