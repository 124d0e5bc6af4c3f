//! What ends a launch: on a GPU it would end the context, or it is something that the interpreter does not do.

use std::fmt;

use thiserror::Error;

/// Where in a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub kernel: String,
    /// Of the CUDA source by `.loc`; of the PTX where it has no `.loc`.
    pub line: u32,
    pub block: [u32; 3],
    /// Its number in the block.
    pub thread: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kernel,
            line,
            block: [x, y, z],
            thread,
        } = self;
        write!(f, "{kernel}, line {line}, block ({x}, {y}, {z}), thread {thread}")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressState {
    /// They are not within one variable or allocation.
    Outside,
    Freed,
}

impl fmt::Display for AddressState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AddressState::Outside => "they are outside every allocation",
            AddressState::Freed => "they were freed",
        })
    }
}

/// Every fault but `Unsupported` and `StepLimit` is the kernel's or its caller's mistake.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    #[error("{place}: {bytes} bytes at {address:#x} are no {space} memory: {state}")]
    IllegalAddress {
        place: Place,
        space: &'static str,
        address: u64,
        bytes: usize,
        state: AddressState,
    },
    #[error("{place}: {address:#x} is not a multiple of the {bytes} bytes that are accessed")]
    Misaligned { place: Place, address: u64, bytes: usize },
    #[error("{place}: threads diverge: {what}")]
    Divergence { place: Place, what: String },
    #[error("{place}: no thread can go on: {what}")]
    Deadlock { place: Place, what: String },
    #[error("{place}: the kernel executed `trap`")]
    Trap { place: Place },
    #[error(
        "{place}: the launch has executed {steps_max} thread instructions; give it more steps, or look for a loop that does not end"
    )]
    StepLimit { place: Place, steps_max: u64 },
    #[error("{place}: the interpreter does not do this: {what}")]
    Unsupported { place: Place, what: String },
    #[error("launch of {kernel}, line {line}: {what}")]
    InvalidLaunch { kernel: String, line: u32, what: String },
}
