//! Products of rows with matrices: the own kernel, and cuBLASLt, which is faster for many shapes and whose bits depend on the
//! whole shape. Which of them computes a shape is decided at the opening (`choice.rs`) and never changes afterwards.

mod buckets;
mod choice;
mod library;
mod own;

use std::fmt::Debug;

use cuda::{DevicePtr, Stream};

use crate::error::WorkError;
use crate::kernels::calls::Output;

pub(crate) use self::choice::{Products, Trial};

/// One product: `out = x * weights^T + bias`, or added to `out` ([`Output::AddF32`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub weights: DevicePtr,
    pub bias: Option<DevicePtr>,
    pub x: DevicePtr,
    pub out: DevicePtr,
    pub rows: u32,
    pub outputs: u32,
    pub inputs: u32,
    pub output: Output,
}

/// A way to compute products.
trait Multiply: Debug {
    /// Gives the product to the stream, and waits for nothing.
    fn enqueue(&self, stream: &Stream, job: &Job) -> Result<(), WorkError>;
}
