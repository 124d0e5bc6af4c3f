//! Generic addresses of memory that is not global: each kind has a window of addresses that no host mapping can have.

use crate::instruction::Space;

/// Addresses of shared memory, local memory and parameters are offsets in their own space, and offset + window generically.
pub(crate) const SHARED: u64 = 0xfff1 << 48;
pub(crate) const LOCAL: u64 = 0xfff2 << 48;
pub(crate) const PARAM: u64 = 0xfff3 << 48;
/// `.global` and `.const` variables of the module. They have these addresses in every space.
pub(crate) const IMAGE: u64 = 0xfff4 << 48;
/// No kind of memory in a window is larger.
const WINDOW_BYTES: u64 = 1 << 32;

/// The offset in the window, if the address is in it.
pub(crate) fn offset_in(window: u64, address: u64) -> Option<u64> {
    address.checked_sub(window).filter(|offset| *offset < WINDOW_BYTES)
}

/// What a generic address means.
pub(crate) fn resolve(address: u64) -> (Space, u64) {
    let windows = [(SHARED, Space::Shared), (LOCAL, Space::Local), (PARAM, Space::Param)];
    let found = windows
        .into_iter()
        .find_map(|(window, space)| Some((space, offset_in(window, address)?)));
    found.unwrap_or((Space::Global, address))
}

pub(crate) fn is_shared(address: u64, _: u64, _: u64) -> u64 {
    u64::from(resolve(address).0 == Space::Shared)
}

pub(crate) fn is_local(address: u64, _: u64, _: u64) -> u64 {
    u64::from(resolve(address).0 == Space::Local)
}

pub(crate) fn is_global(address: u64, _: u64, _: u64) -> u64 {
    u64::from(resolve(address).0 == Space::Global)
}
