//! The call of the matrix product: one kernel for many rows, one for few, with the same sums.

use super::{Call, CallError, in_range, multiple_of};
use crate::kernels::FEW_ROWS;
use crate::kernels::driver::DevicePtr;
use crate::kernels::table::KernelId;

/// What becomes of a sum, after its bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Bf16,
    F32,
    /// Added to the f32 that is there: the residual stream.
    AddF32,
}

/// `out[row][column] = sum(x[row][k] * w[column][k]) + bias[column]`; `x` and `w` are bf16, rows side by side.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub x: DevicePtr,
    pub w: DevicePtr,
    /// f32.
    pub bias: Option<DevicePtr>,
    pub out: DevicePtr,
    pub rows: u32,
    pub columns: u32,
    /// Columns of `x` and `w`.
    pub depth: u32,
    pub output: Output,
}

impl Product {
    /// The tile that suits the number of rows. Both give the same bits.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        self.call_with(self.rows <= FEW_ROWS)
    }

    pub(crate) fn call_with(&self, few_rows: bool) -> Result<Call, CallError> {
        let (kernel, tile) = match (few_rows, self.output) {
            (false, Output::Bf16) => (KernelId::GemmBf16, (64, 128)),
            (false, Output::F32) => (KernelId::GemmF32, (64, 128)),
            (false, Output::AddF32) => (KernelId::GemmF32Add, (64, 128)),
            (true, Output::Bf16) => (KernelId::GemvBf16, (16, 32)),
            (true, Output::F32) => (KernelId::GemvF32, (16, 32)),
            (true, Output::AddF32) => (KernelId::GemvF32Add, (16, 32)),
        };
        multiple_of(kernel, ("columns of the inputs", self.depth.into()), 8)?;
        in_range(kernel, ("outputs of a row", self.columns.into()), u32::MAX.into())?;
        if self.output == Output::Bf16 {
            multiple_of(kernel, ("outputs of a row", self.columns.into()), 2)?;
        }
        Call::new(kernel, [self.rows.div_ceil(tile.0), self.columns.div_ceil(tile.1), 1])
            .pointer(self.x)
            .pointer(self.w)
            .optional(self.bias)
            .pointer(self.out)
            .u32(self.rows)
            .u32(self.columns)
            .u32(self.depth)
            .checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_rows_chooses_the_tile() {
        let at = DevicePtr(4096);
        let product = |rows, columns, output| Product {
            x: at,
            w: at,
            bias: None,
            out: at,
            rows,
            columns,
            depth: 576,
            output,
        };
        let kernel = |rows| product(rows, 1_536, Output::Bf16).call().unwrap();
        assert_eq!((kernel(16).kernel, kernel(16).grid), (KernelId::GemvBf16, [1, 48, 1]));
        assert_eq!((kernel(17).kernel, kernel(17).grid), (KernelId::GemmBf16, [1, 12, 1]));
        assert!(
            product(1, 32_001, Output::F32).call().is_ok(),
            "a vocabulary may be odd"
        );
        assert!(product(1, 33, Output::Bf16).call().is_err());
    }
}
