//! `ldmatrix` and `mma.sync`: which lane holds which element. PTX ISA, "Matrix multiply-accumulate operation using mma".
//!
//! A lane has a group (lane / 4) and a place in it (lane % 4). A register holds two neighbouring values, the first in its low
//! half. Sums are made in f32, one product after the other; a tensor core rounds differently.

use crate::fault::Fault;
use crate::instruction::{Address, Multiply, Space};
use crate::machine::Machine;
use crate::machine::access::Use;
use crate::machine::schedule::WARP_LANES;
use crate::machine::warp::Lanes;
use crate::number::half::{BF16, F16};
use crate::shadow::Usage;
use crate::types::Type;

/// A row of a matrix of 16-bit values.
const ROW_BYTES: usize = 16;

impl Machine<'_> {
    /// `what`: a register for each matrix, the address, whether matrices are transposed.
    pub(super) fn load_matrices(
        &mut self,
        lanes: Lanes,
        what: (&[u32], Address, bool),
        line: u32,
    ) -> Result<(), Fault> {
        let (to, address, is_transposed) = what;
        // Lane i has the address of row i % 8 of matrix i / 8. Other lanes' addresses are not looked at.
        let mut rows = [0; WARP_LANES];
        for (lane, row) in rows.iter_mut().enumerate().take(8 * to.len()) {
            let thread = lanes.first + lane;
            let at = self.address(thread, address);
            let used = Use {
                space: Space::Shared,
                at,
                bytes: ROW_BYTES,
                usage: Usage::Read,
                line,
            };
            self.check_alignment(thread, &used)?;
            *row = self.use_shared(thread, &used)?;
        }
        for lane in 0..WARP_LANES {
            let (group, place) = (lane / 4, lane % 4);
            for (matrix, register) in to.iter().enumerate() {
                let element = |row: usize, column: usize| {
                    let at = rows[8 * matrix + row] + 2 * column;
                    u64::from(u16::from_le_bytes([self.shared[at], self.shared[at + 1]]))
                };
                let value = if is_transposed {
                    element(2 * place, group) | element(2 * place + 1, group) << 16
                } else {
                    element(group, 2 * place) | element(group, 2 * place + 1) << 16
                };
                self.set(lanes.first + lane, *register, value);
            }
        }
        Ok(())
    }

    pub(super) fn multiply(&mut self, lanes: Lanes, multiply: &Multiply) {
        let format = if multiply.ty == Type::F16 { F16 } else { BF16 };
        let halves = |bits: u64| [format.widen(bits as u16), format.widen((bits >> 16) as u16)];
        let depth = 8 * multiply.b.len();
        let (mut a, mut b) = ([[0.0_f32; 16]; 16], [[0.0_f32; 8]; 16]);
        for lane in 0..WARP_LANES {
            let (thread, group, place) = (lanes.first + lane, lane / 4, lane % 4);
            for (register, source) in multiply.a.iter().enumerate() {
                // The second register is 8 rows below the first, the next two are 8 columns to the right.
                let (row, column) = (group + 8 * (register % 2), 2 * place + 8 * (register / 2));
                a[row][column..column + 2].copy_from_slice(&halves(self.get(thread, *source)));
            }
            for (register, source) in multiply.b.iter().enumerate() {
                let [upper, lower] = halves(self.get(thread, *source));
                let row = 2 * place + 8 * register;
                b[row][group] = upper;
                b[row + 1][group] = lower;
            }
        }
        for lane in 0..WARP_LANES {
            let (thread, group, place) = (lanes.first + lane, lane / 4, lane % 4);
            for (register, (to, from)) in multiply.to.into_iter().zip(multiply.c).enumerate() {
                let (row, column) = (group + 8 * (register / 2), 2 * place + register % 2);
                let sum = (0..depth).fold(0.0_f32, |sum, k| sum + a[row][k] * b[k][column]);
                let result = f32::from_bits(self.get(thread, from) as u32) + sum;
                self.set(thread, to, u64::from(result.to_bits()));
            }
        }
    }
}
