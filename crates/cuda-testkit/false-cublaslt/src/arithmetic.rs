//! Owns the sums: each element of the result is summed in f32 over k from 0 on, whatever the other rows and columns are. It trusts
//! its addresses: `product.rs` has made them.

use half::{bf16, f16};

/// A type of matrix elements in memory.
pub(crate) trait Element: Copy {
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

/// A matrix in memory, transposed already where the product wants it so. Steps are in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub(crate) at: u64,
    pub(crate) row_step: usize,
    pub(crate) column_step: usize,
}

impl View {
    fn place<E: Element>(&self, row: usize, column: usize) -> *mut E {
        (self.at as *mut E).wrapping_add(row * self.row_step + column * self.column_step)
    }

    fn get<E: Element>(&self, row: usize, column: usize) -> f32 {
        // SAFETY: `product.rs` declares every element of a view to the driver, which lets the work read and write it now.
        unsafe { self.place::<E>(row, column).read_unaligned() }.to_f32()
    }

    fn set<E: Element>(&self, row: usize, column: usize, value: f32) {
        // SAFETY: as in `get`.
        unsafe { self.place::<E>(row, column).write_unaligned(E::from_f32(value)) }
    }
}

/// `d = alpha * a * b + beta * c`: a is m x k, b is k x n.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sums {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    pub(crate) a: View,
    pub(crate) b: View,
    pub(crate) c: View,
    pub(crate) d: View,
}

/// Columns that are summed together, so that the inner loop runs along them. It changes no sum.
const COLUMNS: usize = 256;

impl Sums {
    pub(crate) fn run<I: Element, O: Element>(&self) {
        for first in (0..self.n).step_by(COLUMNS) {
            self.run_columns::<I, O>(first, COLUMNS.min(self.n - first));
        }
    }

    fn run_columns<I: Element, O: Element>(&self, first: usize, count: usize) {
        let mut b = vec![0.0; self.k * count];
        for (k, row) in b.chunks_exact_mut(count).enumerate() {
            for (column, value) in row.iter_mut().enumerate() {
                *value = self.b.get::<I>(k, first + column);
            }
        }
        let mut sums = vec![0.0_f32; count];
        for row in 0..self.m {
            sums.fill(0.0);
            for (k, values) in b.chunks_exact(count).enumerate() {
                let a = self.a.get::<I>(row, k);
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += a * value;
                }
            }
            for (column, sum) in sums.iter().enumerate() {
                let column = first + column;
                let mut value = self.alpha * sum;
                // A c that counts for nothing is not read: it may be NaN or not be there.
                if self.beta != 0.0 {
                    value += self.beta * self.c.get::<O>(row, column);
                }
                self.d.set::<O>(row, column, value);
            }
        }
    }
}
