//! The arithmetic of PTX, on bits. Pure: no registers, no memory.

pub(crate) mod bits;
pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod integer;
