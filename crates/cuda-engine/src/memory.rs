//! Whether a model fits a device, by figures that are known before anything is loaded.

use engine::for_devices::Bytes;
use thiserror::Error;

use crate::options::KvRoom;

/// Left free when KV gets the rest: code of kernels and libraries, tables of the driver, and what other processes' contexts
/// need. cuBLASLt's code alone takes some hundred MB.
const RESERVE_BYTES: u64 = 512 << 20;

/// Bytes that an engine needs on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceNeed {
    pub weights: u64,
    /// Memory of a step.
    pub buffers: u64,
    pub kv: u64,
}

/// The refusal. It is final unless other processes on the device end: nothing was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the model does not fit: needs {} for weights and {} for KV, and {} for buffers, cuda:{} has {} free; take a smaller model, \
     lower --kv-cache-memory or --max-num-batched-tokens, or end other programs on the GPU",
    Bytes(.need.weights), Bytes(.need.kv), Bytes(.need.buffers), .room.ordinal, Bytes(.room.free)
)]
pub struct DoesNotFit {
    pub need: DeviceNeed,
    pub room: DeviceRoom,
}

/// A device, as far as its memory goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRoom {
    /// The N of `cuda:N`.
    pub ordinal: u32,
    pub free: u64,
}

impl DeviceNeed {
    /// How many KV blocks the engine gets, at least one.
    ///
    /// # Errors
    /// [`DoesNotFit`].
    pub(crate) fn blocks(mut self, kv: KvRoom, block_bytes: u64, room: DeviceRoom) -> Result<u32, DoesNotFit> {
        let others = self.weights.saturating_add(self.buffers);
        let wanted = match kv {
            KvRoom::Bytes(bytes) => bytes,
            KvRoom::Rest => room.free.saturating_sub(others.saturating_add(RESERVE_BYTES)),
        };
        let blocks = u32::try_from(wanted / block_bytes.max(1)).unwrap_or(u32::MAX).max(1);
        self.kv = u64::from(blocks).saturating_mul(block_bytes);
        match others.saturating_add(self.kv) <= room.free {
            true => Ok(blocks),
            false => Err(DoesNotFit { need: self, room }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEED: DeviceNeed = DeviceNeed {
        weights: 5_100_000_000,
        buffers: 40_000_000,
        kv: 0,
    };

    fn room(free: u64) -> DeviceRoom {
        DeviceRoom { ordinal: 0, free }
    }

    #[test]
    fn the_refusal_has_the_figures() {
        let refused = NEED.blocks(KvRoom::Bytes(2_000_000_000), 1_000_000, room(3_900_000_000));
        let text = refused.unwrap_err().to_string();
        for part in [
            "5.1 GB for weights and 2.0 GB for KV",
            "40.0 MB for buffers",
            "cuda:0 has 3.9 GB free",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn blocks_are_as_many_as_fit_and_at_least_one() {
        let bytes = |bytes| NEED.blocks(KvRoom::Bytes(bytes), 1_000, room(u64::MAX));
        assert_eq!(bytes(2_500), Ok(2));
        assert_eq!(bytes(0), Ok(1));
        let free = 5_140_000_000 + RESERVE_BYTES + 5_500;
        assert_eq!(NEED.blocks(KvRoom::Rest, 1_000, room(free)), Ok(5));
        assert!(NEED.blocks(KvRoom::Rest, 1_000, room(0)).is_err());
        assert!(
            NEED.blocks(KvRoom::Bytes(1_000), 1_000, room(5_140_001_000)).is_ok(),
            "it fits to the byte"
        );
    }
}
