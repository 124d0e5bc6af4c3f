//! A call of a kernel as a value: which kernel, how many blocks, which arguments. Each kernel has a struct with named fields
//! that makes its call and checks what the kernel takes for granted.
//!
//! Never does: a launch (`loaded.rs`). So what a call holds can be tested without a device.

mod attention;
mod bytes;
mod product;
mod rows;
mod sampling;

use thiserror::Error;

use super::driver::DevicePtr;
use super::table::{ArgKind, KernelId};

pub use attention::{DecodeAttention, PagedKv, PrefillAttention, RowTile};
pub use bytes::{CopyBlocks, Dequantise, HashBlocks, Pieces};
pub use product::{Output, Product};
pub use rows::{
    AddRmsNorm, CapLogits, Embed, Gate, GateFunction, GatherRows, RmsNorm, RopeAngles, RopePairs, RopeWrite,
};
pub use sampling::{
    ADJUSTMENT_BYTES, Adjustment, DRAW_BYTES, DRAWN_BYTES, Draw, DrawTokens, Drawn, EDIT_BYTES, Edit, PrepareLogits,
};

/// Most arguments of a kernel here: RoPE has 18.
const ARGS_MAX: usize = 20;
/// Most blocks along the second and third axis of a grid (CUDA C++ programming guide, technical specifications).
const GRID_YZ_MAX: u32 = 65_535;
/// Most blocks along the first axis.
const GRID_X_MAX: u32 = i32::MAX as u32;

/// One argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    /// An address on the device.
    Pointer(u64),
    U32(u32),
    U64(u64),
    F32(f32),
}

impl Value {
    fn kind(self) -> ArgKind {
        match self {
            Value::Pointer(_) => ArgKind::Pointer,
            Value::U32(_) => ArgKind::U32,
            Value::U64(_) => ArgKind::U64,
            Value::F32(_) => ArgKind::F32,
        }
    }
}

/// Why a kernel was not called. The cause is the engine's own code, or a model whose numbers should have been refused at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError {
    #[error("kernel {kernel:?} was given {value} {what}, but it needs a multiple of {of}: a bug of the GPU engine")]
    NotMultiple {
        kernel: KernelId,
        what: &'static str,
        value: u64,
        of: u64,
    },
    #[error("kernel {kernel:?} was given {value} {what}, but it takes 1 to {most}: a bug of the GPU engine")]
    OutOfRange {
        kernel: KernelId,
        what: &'static str,
        value: u64,
        most: u64,
    },
    #[error("kernel {kernel:?} was called with other arguments than it has: a bug of the GPU engine")]
    WrongArguments { kernel: KernelId },
}

/// A call that can be launched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    pub(crate) kernel: KernelId,
    pub(crate) grid: [u32; 3],
    values: [Value; ARGS_MAX],
    count: usize,
}

impl Call {
    fn new(kernel: KernelId, grid: [u32; 3]) -> Self {
        Self {
            kernel,
            grid,
            values: [Value::U32(0); ARGS_MAX],
            count: 0,
        }
    }

    fn value(mut self, value: Value) -> Self {
        if let Some(place) = self.values.get_mut(self.count) {
            *place = value;
        }
        // One too many is seen by `checked`.
        self.count += 1;
        self
    }

    fn pointer(self, pointer: DevicePtr) -> Self {
        self.value(Value::Pointer(pointer.0))
    }

    /// A kernel knows a missing pointer by its being zero.
    fn optional(self, pointer: Option<DevicePtr>) -> Self {
        self.pointer(pointer.unwrap_or(DevicePtr(0)))
    }

    fn u32(self, value: u32) -> Self {
        self.value(Value::U32(value))
    }

    fn u64(self, value: u64) -> Self {
        self.value(Value::U64(value))
    }

    fn f32(self, value: f32) -> Self {
        self.value(Value::F32(value))
    }

    pub(crate) fn values(&self) -> &[Value] {
        &self.values[..self.count.min(ARGS_MAX)]
    }

    /// The arguments are those of the table, and the grid is one that a device accepts.
    fn checked(self) -> Result<Self, CallError> {
        let kernel = self.kernel;
        let expected = kernel.facts().args.iter().map(|arg| arg.kind);
        if self.count > ARGS_MAX || !expected.eq(self.values().iter().map(|value| value.kind())) {
            return Err(CallError::WrongArguments { kernel });
        }
        let axes = [GRID_X_MAX, GRID_YZ_MAX, GRID_YZ_MAX];
        for (blocks, most) in self.grid.into_iter().zip(axes) {
            in_range(kernel, ("blocks of a grid's axis", blocks.into()), most.into())?;
        }
        Ok(self)
    }
}

fn multiple_of(kernel: KernelId, (what, value): (&'static str, u64), of: u64) -> Result<(), CallError> {
    match value.is_multiple_of(of) && value > 0 {
        true => Ok(()),
        false => Err(CallError::NotMultiple {
            kernel,
            what,
            value,
            of,
        }),
    }
}

fn in_range(kernel: KernelId, (what, value): (&'static str, u64), most: u64) -> Result<(), CallError> {
    match (1..=most).contains(&value) {
        true => Ok(()),
        false => Err(CallError::OutOfRange {
            kernel,
            what,
            value,
            most,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_with_other_arguments_is_refused() {
        let right = Call::new(KernelId::CapLogits, [1, 1, 1])
            .pointer(DevicePtr(64))
            .u64(3)
            .f32(30.0);
        assert!(right.checked().is_ok());
        let wrong = CallError::WrongArguments {
            kernel: KernelId::CapLogits,
        };
        assert_eq!(right.u32(1).checked(), Err(wrong), "one too many");
        let other = Call::new(KernelId::CapLogits, [1, 1, 1])
            .pointer(DevicePtr(64))
            .u32(3)
            .f32(30.0);
        assert_eq!(other.checked(), Err(wrong), "a number of another size");
        let many = (0..ARGS_MAX + 3).fold(right, |call, _| call.u32(0));
        assert_eq!(many.checked(), Err(wrong));
    }

    #[test]
    fn a_grid_that_no_device_takes_is_refused() {
        for grid in [[0, 1, 1], [1, 65_536, 1], [1, 1, 0]] {
            let call = Call::new(KernelId::CapLogits, grid)
                .pointer(DevicePtr(64))
                .u64(3)
                .f32(30.0);
            assert!(matches!(call.checked(), Err(CallError::OutOfRange { .. })), "{grid:?}");
        }
    }
}
