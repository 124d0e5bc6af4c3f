//! What a kernel is launched with.

use std::ffi::c_void;

/// More arguments than any kernel of ours has. A launch with more is refused.
pub const ARGS_MAX: usize = 32;

// A value of four bytes lies in the first half of its place.
const _: () = assert!(cfg!(target_endian = "little"), "CUDA runs on little-endian hosts");

/// The arguments of one launch, in order. Their types must be those of the kernel: the driver cannot check them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Args {
    values: [u64; ARGS_MAX],
    /// How many were given, also those that have no place.
    count: usize,
}

impl Default for Args {
    fn default() -> Self {
        Self::new()
    }
}

impl Args {
    pub fn new() -> Self {
        Self {
            values: [0; ARGS_MAX],
            count: 0,
        }
    }

    fn with(mut self, value: u64) -> Self {
        if let Some(place) = self.values.get_mut(self.count) {
            *place = value;
        }
        self.count += 1;
        self
    }

    #[must_use]
    pub fn pointer(self, pointer: super::DevicePtr) -> Self {
        self.with(pointer.0)
    }

    #[must_use]
    pub fn i32(self, value: i32) -> Self {
        self.u32(value.cast_unsigned())
    }

    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.with(u64::from(value))
    }

    #[must_use]
    pub fn u64(self, value: u64) -> Self {
        self.with(value)
    }

    #[must_use]
    pub fn f32(self, value: f32) -> Self {
        self.u32(value.to_bits())
    }

    pub(super) fn has_too_many(&self) -> bool {
        self.count > ARGS_MAX
    }

    /// The address of each place, as the driver wants them. A kernel that has more arguments than were given finds zeros.
    pub(super) fn addresses(&self) -> [*mut c_void; ARGS_MAX] {
        std::array::from_fn(|at| (&raw const self.values[at]).cast_mut().cast())
    }
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block. More than 48 KiB only after
    /// [`Function::allow_shared_bytes`](super::Function::allow_shared_bytes).
    pub shared_bytes: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DevicePtr;

    /// # Safety
    /// The place is one of living arguments.
    unsafe fn read<T: Copy>(place: *mut c_void) -> T {
        // SAFETY: the caller's promise. Every place is aligned for eight bytes.
        unsafe { place.cast::<T>().read() }
    }

    #[test]
    fn each_argument_is_found_at_its_address_with_its_type() {
        let args = Args::new()
            .pointer(DevicePtr(0x7fff_0000_1234))
            .i32(-5)
            .u32(7)
            .u64(u64::MAX - 1)
            .f32(-1.5);
        let places = args.addresses();
        // SAFETY: `args` lives, and each type is the one that was given.
        unsafe {
            assert_eq!(read::<u64>(places[0]), 0x7fff_0000_1234);
            assert_eq!(read::<i32>(places[1]), -5);
            assert_eq!(read::<u32>(places[2]), 7);
            assert_eq!(read::<u64>(places[3]), u64::MAX - 1);
            assert_eq!(read::<f32>(places[4]), -1.5);
        }
    }

    #[test]
    fn a_thirty_third_argument_is_noticed_and_harms_nothing() {
        let full = (0..32).fold(Args::new(), |args, value| args.u32(value));
        assert!(!full.has_too_many());
        let over = full.u32(99);
        assert!(over.has_too_many());
        assert_eq!(over.values, full.values);
    }
}
