//! Places in one allocation of device memory. They are planned before it is made, so its size is known first.

use cuda::DevicePtr;

/// Allocations of the driver begin at a multiple of it (CUDA C++ programming guide, device memory accesses). The widest load of
/// a kernel and cuBLASLt's matrices need 16.
const ALIGNMENT: usize = 256;

/// A position in an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(usize);

impl Place {
    /// Its address in the allocation that begins at `base`.
    pub(crate) fn of(self, base: DevicePtr) -> DevicePtr {
        base.offset(self.0)
    }

    pub(crate) fn behind(self, bytes: usize) -> Self {
        Self(self.0.saturating_add(bytes))
    }
}

/// Gives places, one after the other. Sizes beyond all memory end at the largest number, which no device has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Arena {
    end: usize,
}

impl Arena {
    pub(crate) fn place(&mut self, bytes: usize) -> Place {
        let place = Place(self.end);
        let end = self.end.saturating_add(bytes);
        self.end = end.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        place
    }

    /// Of all places so far.
    pub(crate) fn bytes(&self) -> usize {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_each_other_at_aligned_addresses() {
        let mut arena = Arena::default();
        let places = [arena.place(1), arena.place(0), arena.place(257), arena.place(8)];
        let addresses = places.map(|place| place.of(DevicePtr(0x1000)).0);
        assert_eq!(addresses, [0x1000, 0x1100, 0x1100, 0x1300]);
        assert_eq!(arena.bytes(), 0x400);
        assert_eq!(places[2].behind(16).of(DevicePtr(0)).0, 0x110);
    }

    #[test]
    fn sizes_beyond_all_memory_do_not_wrap_around() {
        let mut arena = Arena::default();
        arena.place(usize::MAX - 5);
        arena.place(100);
        assert_eq!(arena.bytes(), usize::MAX);
    }
}
