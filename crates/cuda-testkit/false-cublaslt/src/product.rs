//! Owns what a valid product is: it reads the objects of a call, checks them against each other, and says which memory is used.

use half::{bf16, f16};

use crate::arithmetic::{Sums, View};
use crate::attributes::{Object, layout, operation};
use crate::outside_abi::OutsideAccess;
use crate::status::Status;

/// `CUBLAS_COMPUTE_32F`
const COMPUTE_32F: u64 = 68;
/// `CUBLASLT_EPILOGUE_DEFAULT`
const EPILOGUE_DEFAULT: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    F32,
    F16,
    Bf16,
}

impl Type {
    /// `cudaDataType`
    fn of(number: u64) -> Result<Self, Status> {
        match number {
            0 => Ok(Type::F32),
            2 => Ok(Type::F16),
            14 => Ok(Type::Bf16),
            _ => Err(Status::NotSupported),
        }
    }

    fn bytes(self) -> usize {
        if self == Type::F32 { 4 } else { 2 }
    }
}

/// A matrix, or as many as a batch has.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    kind: Type,
    rows: usize,
    columns: usize,
    /// Elements from one line to the next, where a line is a column or, in row order, a row.
    ld: usize,
    is_row_order: bool,
    batch_count: usize,
    batch_step: usize,
}

impl Matrix {
    fn read(object: &Object) -> Result<Self, Status> {
        let size = |attribute, default| {
            let value = object.get(attribute, default);
            usize::try_from(value as i64).map_err(|_| Status::InvalidValue)
        };
        let matrix = Self {
            kind: Type::of(object.get(layout::TYPE, 0))?,
            rows: size(layout::ROWS, 0)?,
            columns: size(layout::COLS, 0)?,
            ld: size(layout::LD, 0)?,
            is_row_order: match object.get(layout::ORDER, 0) {
                0 => false,
                1 => true,
                _ => return Err(Status::NotSupported),
            },
            batch_count: object.get(layout::BATCH_COUNT, 1) as usize,
            batch_step: size(layout::BATCH_OFFSET, 0)?,
        };
        let is_empty = matrix.rows == 0 || matrix.columns == 0 || matrix.batch_count == 0;
        if is_empty || matrix.ld < matrix.line() || matrix.elements().is_none() {
            return Err(Status::InvalidValue);
        }
        Ok(matrix)
    }

    fn line(&self) -> usize {
        if self.is_row_order { self.columns } else { self.rows }
    }

    fn lines(&self) -> usize {
        if self.is_row_order { self.rows } else { self.columns }
    }

    /// From the first element to the last one of the last batch. `None`: more than memory can have.
    fn elements(&self) -> Option<usize> {
        let of_one = self.ld.checked_mul(self.lines())?;
        let elements = self.batch_step.checked_mul(self.batch_count)?.checked_add(of_one)?;
        elements
            .checked_mul(8)
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .map(|_| elements)
    }

    fn shape(&self, is_transposed: bool) -> (usize, usize) {
        if is_transposed {
            (self.columns, self.rows)
        } else {
            (self.rows, self.columns)
        }
    }

    fn view(&self, at: u64, batch: usize, is_transposed: bool) -> View {
        let at = at + (batch * self.batch_step * self.kind.bytes()) as u64;
        let (row_step, column_step) = match self.is_row_order != is_transposed {
            true => (self.ld, 1),
            false => (1, self.ld),
        };
        View {
            at,
            row_step,
            column_step,
        }
    }

    /// The bytes of the elements, without the gaps between lines and batches.
    fn accesses(&self, at: u64, is_write: bool) -> Vec<OutsideAccess> {
        let width = self.kind.bytes();
        let access = |element: usize, count: usize| OutsideAccess {
            at: at + (element * width) as u64,
            bytes: count * width,
            is_write: is_write.into(),
        };
        let batches = (0..self.batch_count).map(|batch| batch * self.batch_step);
        if self.ld == self.line() {
            return batches.map(|start| access(start, self.line() * self.lines())).collect();
        }
        let lines = batches.flat_map(|start| (0..self.lines()).map(move |line| start + line * self.ld));
        lines.map(|start| access(start, self.line())).collect()
    }
}

/// Where the matrices and the scales of a call are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) c: u64,
    pub(crate) d: u64,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
}

/// The objects of a call.
#[derive(Clone, Debug)]
pub(crate) struct Objects {
    pub(crate) operation: Object,
    pub(crate) a: Object,
    pub(crate) b: Object,
    pub(crate) c: Object,
    pub(crate) d: Object,
}

/// A product whose parts fit each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    a: Matrix,
    b: Matrix,
    c: Matrix,
    d: Matrix,
    is_a_transposed: bool,
    is_b_transposed: bool,
}

/// `cublasOperation_t`. A conjugate is a transposition, as the numbers are real.
fn is_transposed(operation: &Object, attribute: i32) -> Result<bool, Status> {
    match operation.get(attribute, 0) {
        0 => Ok(false),
        1 | 2 => Ok(true),
        _ => Err(Status::InvalidValue),
    }
}

impl Product {
    pub(crate) fn check(objects: &Objects) -> Result<Self, Status> {
        use operation::{COMPUTE_TYPE, EPILOGUE, HINTS, POINTER_MODE, SCALE_TYPE, TRANSA, TRANSB};
        let what = &objects.operation;
        let known = [
            COMPUTE_TYPE,
            SCALE_TYPE,
            POINTER_MODE,
            TRANSA,
            TRANSB,
            EPILOGUE,
            HINTS[0],
            HINTS[1],
        ];
        let is_plain = what.get(COMPUTE_TYPE, 0) == COMPUTE_32F
            && what.get(SCALE_TYPE, 0) == 0
            && what.get(POINTER_MODE, 0) == 0
            && what.get(EPILOGUE, EPILOGUE_DEFAULT) == EPILOGUE_DEFAULT
            && !what.sets_beside(&known);
        if !is_plain {
            return Err(Status::NotSupported);
        }
        let product = Self {
            a: Matrix::read(&objects.a)?,
            b: Matrix::read(&objects.b)?,
            c: Matrix::read(&objects.c)?,
            d: Matrix::read(&objects.d)?,
            is_a_transposed: is_transposed(what, TRANSA)?,
            is_b_transposed: is_transposed(what, TRANSB)?,
        };
        let Self { a, b, c, d, .. } = &product;
        if a.kind != b.kind || c.kind != d.kind || (d.kind != Type::F32 && d.kind != a.kind) {
            return Err(Status::NotSupported);
        }
        let ((m, k), (b_k, n)) = (a.shape(product.is_a_transposed), b.shape(product.is_b_transposed));
        let fits = k == b_k && d.shape(false) == (m, n) && c.shape(false) == (m, n);
        let batch_counts = [b.batch_count, c.batch_count, d.batch_count];
        // Batches of the result that lie over each other would depend on their order.
        let is_apart = d.batch_count == 1 || d.batch_step >= d.ld * (d.lines() - 1) + d.line();
        if fits && is_apart && batch_counts == [a.batch_count; 3] {
            Ok(product)
        } else {
            Err(Status::InvalidValue)
        }
    }

    pub(crate) fn accesses(&self, operands: &Operands) -> Vec<OutsideAccess> {
        let mut accesses = self.a.accesses(operands.a, false);
        accesses.extend(self.b.accesses(operands.b, false));
        if operands.beta != 0.0 {
            accesses.extend(self.c.accesses(operands.c, false));
        }
        accesses.extend(self.d.accesses(operands.d, true));
        accesses
    }

    pub(crate) fn run(&self, operands: &Operands) {
        let (m, k) = self.a.shape(self.is_a_transposed);
        for batch in 0..self.d.batch_count {
            let sums = Sums {
                m,
                n: self.d.columns,
                k,
                alpha: operands.alpha,
                beta: operands.beta,
                a: self.a.view(operands.a, batch, self.is_a_transposed),
                b: self.b.view(operands.b, batch, self.is_b_transposed),
                c: self.c.view(operands.c, batch, false),
                d: self.d.view(operands.d, batch, false),
            };
            match (self.a.kind, self.d.kind) {
                (Type::F32, _) => sums.run::<f32, f32>(),
                (Type::F16, Type::F32) => sums.run::<f16, f32>(),
                (Type::F16, _) => sums.run::<f16, f16>(),
                (Type::Bf16, Type::F32) => sums.run::<bf16, f32>(),
                (Type::Bf16, _) => sums.run::<bf16, bf16>(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attributes::Kind;

    fn matrix(kind: u64, shape: (u64, u64), ld: u64, more: &[(i32, u64)]) -> Object {
        let (rows, columns) = shape;
        let mut values = vec![
            (layout::TYPE, kind),
            (layout::ROWS, rows),
            (layout::COLS, columns),
            (layout::LD, ld),
        ];
        values.extend(more);
        Object::new(Kind::Layout, &values)
    }

    fn objects(operation: &[(i32, u64)], layouts: [Object; 3]) -> Objects {
        let mut values = vec![(operation::COMPUTE_TYPE, COMPUTE_32F)];
        values.extend(operation);
        let [a, b, d] = layouts;
        Objects {
            operation: Object::new(Kind::Operation, &values),
            a,
            b,
            c: d.clone(),
            d,
        }
    }

    fn at<T>(values: &mut [T]) -> u64 {
        values.as_mut_ptr() as u64
    }

    const ROW: (i32, u64) = (layout::ORDER, 1);

    #[test]
    fn a_transposed_product_of_bf16_is_the_plain_sum() {
        // In column order, as an engine calls it: weights are k x n with k along memory, rows are k x m.
        let weights: Vec<bf16> = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(bf16::from_f32).to_vec();
        let rows: Vec<bf16> = [1.0, 10.0, 100.0].map(bf16::from_f32).to_vec();
        let (mut weights, mut rows, mut result) = (weights, rows, vec![0.0_f32; 2]);
        let layouts = [
            matrix(14, (3, 2), 3, &[]),
            matrix(14, (3, 1), 3, &[]),
            matrix(0, (2, 1), 2, &[]),
        ];
        let product = Product::check(&objects(&[(operation::TRANSA, 1)], layouts)).unwrap();
        let (a, b, d) = (at(&mut weights), at(&mut rows), at(&mut result));
        product.run(&Operands {
            a,
            b,
            c: d,
            d,
            alpha: 1.0,
            beta: 0.0,
        });
        assert_eq!(result, [321.0, 654.0]);
    }

    #[test]
    fn row_order_batches_and_beta_are_obeyed() {
        let mut a = vec![1.0_f32, 2.0, 3.0, 4.0, /* second batch */ 1.0, 0.0, 0.0, 1.0];
        let mut b = vec![1.0_f32, 1.0, 1.0, 1.0];
        let mut d = vec![1.0_f32; 8];
        let batch = |step| [ROW, (layout::BATCH_COUNT, 2), (layout::BATCH_OFFSET, step)];
        let layouts = [
            matrix(0, (2, 2), 2, &batch(4)),
            matrix(0, (2, 2), 2, &batch(0)),
            matrix(0, (2, 2), 2, &batch(4)),
        ];
        let product = Product::check(&objects(&[], layouts)).unwrap();
        let (a, b, d_at) = (at(&mut a), at(&mut b), at(&mut d));
        product.run(&Operands {
            a,
            b,
            c: d_at,
            d: d_at,
            alpha: 2.0,
            beta: 10.0,
        });
        assert_eq!(d, [16.0, 16.0, 24.0, 24.0, 12.0, 12.0, 12.0, 12.0]);
    }

    #[test]
    fn a_c_that_counts_for_nothing_is_not_read() {
        let (mut a, mut b, mut d) = (vec![2.0_f32], vec![3.0_f32], vec![f32::NAN]);
        let one = || matrix(0, (1, 1), 1, &[]);
        let product = Product::check(&objects(&[], [one(), one(), one()])).unwrap();
        let operands = Operands {
            a: at(&mut a),
            b: at(&mut b),
            c: 0,
            d: at(&mut d),
            alpha: 1.0,
            beta: 0.0,
        };
        product.run(&operands);
        assert_eq!(d, [6.0]);
        assert!(product.accesses(&operands).iter().all(|access| access.at != 0));
    }

    #[test]
    fn gaps_between_lines_are_not_used() {
        let layouts = [
            matrix(14, (3, 2), 8, &[]),
            matrix(14, (2, 2), 2, &[]),
            matrix(14, (3, 2), 3, &[]),
        ];
        let product = Product::check(&objects(&[], layouts)).unwrap();
        let accesses = product.accesses(&Operands {
            a: 1000,
            b: 2000,
            c: 0,
            d: 3000,
            alpha: 1.0,
            beta: 0.0,
        });
        let ranges: Vec<(u64, usize)> = accesses.iter().map(|access| (access.at, access.bytes)).collect();
        assert_eq!(ranges, [(1000, 6), (1016, 6), (2000, 8), (3000, 12)]);
    }

    #[test]
    fn what_does_not_fit_is_invalid_and_what_is_strange_is_not_supported() {
        let good = || {
            [
                matrix(0, (2, 3), 2, &[]),
                matrix(0, (3, 4), 3, &[]),
                matrix(0, (2, 4), 2, &[]),
            ]
        };
        let refused = |operation: &[(i32, u64)], layouts| Product::check(&objects(operation, layouts)).err();
        assert_eq!(refused(&[], good()), None);
        assert_eq!(refused(&[(operation::TRANSA, 1)], good()), Some(Status::InvalidValue));
        assert_eq!(refused(&[(operation::TRANSA, 7)], good()), Some(Status::InvalidValue));
        assert_eq!(refused(&[(operation::EPILOGUE, 4)], good()), Some(Status::NotSupported));
        assert_eq!(refused(&[(17, 0x1000)], good()), Some(Status::NotSupported));
        let [_, b, d] = good();
        assert_eq!(
            refused(&[], [matrix(0, (2, 3), 1, &[]), b, d]),
            Some(Status::InvalidValue)
        );
        let [a, b, _] = good();
        assert_eq!(
            refused(&[], [a, b, matrix(14, (2, 4), 2, &[])]),
            Some(Status::NotSupported)
        );
    }
}
