//! A planned product: `Y = X * W`, with X `rows x inputs` and Y `rows x outputs`, both row by row in memory.
//!
//! cuBLASLt counts column by column. A matrix that is stored row by row is its transpose there, so the plan computes
//! `Y^T = W^T * X^T`: the weights are A, the activations B, and no byte is moved for it.

use std::ffi::{c_int, c_void};
use std::fmt;

use super::{CublasLt, GemmError, bytes_of, checked};
use crate::device::{DevicePtr, Stream};
use crate::loader::cublaslt_table::{
    COMPUTE_32F, CublasLtTable, DESC_TRANSA, DESC_TRANSB, Descriptor, HeuristicResult, OP_N, OP_T,
    PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENTS, R_16BF, R_32F, SUCCESS,
};

/// Ways to compute that are asked for. The engine times them at its start.
const CHOICES_MAX: usize = 8;
/// Every matrix begins at a multiple of this. Kernels with wide loads need no more, and rows of activations begin there.
const ALIGNMENT_BYTES: u32 = 16;

/// How the weights lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightLayout {
    /// `[outputs][inputs]`, as model files have them.
    OutputsFirst,
    /// `[inputs][outputs]`.
    InputsFirst,
}

/// What the results are rounded to. Sums are in f32 either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Output {
    Bf16,
    F32,
}

impl Output {
    fn data_type(self) -> c_int {
        match self {
            Output::Bf16 => R_16BF,
            Output::F32 => R_32F,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GemmShape {
    pub rows: u32,
    pub outputs: u32,
    pub inputs: u32,
    pub weights: WeightLayout,
    pub output: Output,
}

impl fmt::Display for GemmShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rows, outputs, inputs, ..
        } = self;
        write!(
            f,
            "{rows} x {inputs} times {inputs} x {outputs} ({:?}, {:?})",
            self.weights, self.output
        )
    }
}

/// A matrix as the library sees it: column by column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Columns {
    rows: u64,
    columns: u64,
    /// Elements from a column to the next.
    stride: i64,
}

/// A, B and D of the library, and whether A is transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Views {
    transpose_a: c_int,
    a: Columns,
    b: Columns,
    d: Columns,
}

impl GemmShape {
    fn views(&self) -> Views {
        // Row by row and column by column with one stride: the memory is dense.
        let dense = |rows: u32, columns: u32| Columns {
            rows: u64::from(rows),
            columns: u64::from(columns),
            stride: i64::from(rows),
        };
        let (transpose_a, a) = match self.weights {
            WeightLayout::OutputsFirst => (OP_T, dense(self.inputs, self.outputs)),
            WeightLayout::InputsFirst => (OP_N, dense(self.outputs, self.inputs)),
        };
        Views {
            transpose_a,
            a,
            b: dense(self.inputs, self.rows),
            d: dense(self.outputs, self.rows),
        }
    }
}

/// Memory of the device for partial sums. Two products that may run at the same time need two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workspace {
    pub at: DevicePtr,
    pub bytes: usize,
}

/// Addresses of one product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operands {
    pub weights: DevicePtr,
    pub inputs: DevicePtr,
    pub outputs: DevicePtr,
    /// The product is multiplied by it.
    pub alpha: f32,
    /// What was in the outputs is multiplied by it and added: 1 adds a residual, 0 does not read the outputs.
    pub beta: f32,
}

/// A descriptor of the library, with the function that frees it.
struct Owned {
    raw: Descriptor,
    free: unsafe extern "C" fn(Descriptor) -> c_int,
}

// SAFETY: a descriptor is plain data of the library; it belongs to no thread and is only read after its plan is made.
unsafe impl Send for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: this value owns it.
        let _ = unsafe { (self.free)(self.raw) };
    }
}

/// A product of one shape, planned once and launched often.
pub struct GemmPlan {
    library: CublasLt,
    shape: GemmShape,
    desc: Owned,
    a: Owned,
    b: Owned,
    d: Owned,
    choices: Vec<HeuristicResult>,
    chosen: usize,
}

impl fmt::Debug for GemmPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (choices, chosen) = (self.choices.len(), self.chosen);
        write!(f, "GemmPlan({}, {chosen} of {choices})", self.shape)
    }
}

impl GemmPlan {
    /// Asks the library for ways to compute the product, the best guess first.
    ///
    /// # Errors
    /// The library does not support the shape, or needs more workspace.
    pub fn new(library: &CublasLt, shape: GemmShape, workspace_bytes: usize) -> Result<Self, GemmError> {
        let table = &library.open.table;
        library.open.device.context().enter()?;
        let views = shape.views();
        let create = |raw: *mut Descriptor| {
            // SAFETY: the library writes one descriptor.
            unsafe { (table.desc_create)(raw, COMPUTE_32F, R_32F) }
        };
        let desc = make(("cublasLtMatmulDescCreate", shape), table.desc_destroy, create)?;
        for (attribute, value) in [(DESC_TRANSA, views.transpose_a), (DESC_TRANSB, OP_N)] {
            let (at, bytes) = bytes_of(&value);
            // SAFETY: the attribute is an int.
            let code = unsafe { (table.desc_set)(desc.raw, attribute, at, bytes) };
            checked(("cublasLtMatmulDescSetAttribute", code), || shape.to_string())?;
        }
        let a = layout(table, shape, (R_16BF, views.a))?;
        let b = layout(table, shape, (R_16BF, views.b))?;
        let d = layout(table, shape, (shape.output.data_type(), views.d))?;
        let preference = preference(table, shape, workspace_bytes)?;
        let mut choices = [HeuristicResult::default(); CHOICES_MAX];
        let mut count: c_int = 0;
        // SAFETY: all descriptors are alive, and the library writes at most as many results as it is told. C and D are one.
        let code = unsafe {
            (table.heuristic)(
                library.open.handle,
                desc.raw,
                a.raw,
                b.raw,
                d.raw,
                d.raw,
                preference.raw,
                CHOICES_MAX as c_int,
                choices.as_mut_ptr(),
                &raw mut count,
            )
        };
        checked(("cublasLtMatmulAlgoGetHeuristic", code), || shape.to_string())?;
        let choices = usable(&choices, count);
        if choices.is_empty() {
            return Err(GemmError::NoAlgorithm {
                shape: shape.to_string(),
                workspace_bytes: workspace_bytes as u64,
            });
        }
        let library = library.clone();
        Ok(Self {
            library,
            shape,
            desc,
            a,
            b,
            d,
            choices,
            chosen: 0,
        })
    }

    pub fn shape(&self) -> GemmShape {
        self.shape
    }

    /// How many ways there are, at least one. They differ in time and in the last bits.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Takes another way from now on. A number beyond the last takes the last.
    pub fn choose(&mut self, choice: usize) {
        self.chosen = choice.min(self.choices.len() - 1);
    }

    /// What the chosen way needs.
    pub fn workspace_bytes(&self) -> usize {
        self.choices[self.chosen].workspace_bytes
    }

    /// Launches the product.
    ///
    /// # Errors
    /// An address is not a multiple of 16, the workspace is too small, or the device has failed.
    pub fn run(&self, stream: &Stream, operands: &Operands, workspace: Workspace) -> Result<(), GemmError> {
        let choice = &self.choices[self.chosen];
        let misuse = |what| {
            let shape = self.shape.to_string();
            Err(GemmError::Misuse { what, shape })
        };
        let matrices = [operands.weights, operands.inputs, operands.outputs];
        if matrices
            .iter()
            .any(|at| !at.0.is_multiple_of(u64::from(ALIGNMENT_BYTES)))
        {
            return misuse("an address is not a multiple of 16");
        }
        if choice.workspace_bytes > workspace.bytes {
            return misuse("the workspace is too small");
        }
        stream.context().enter()?;
        let [a, b, d] = matrices.map(address);
        let open = &self.library.open;
        // SAFETY: all descriptors are alive, and the two factors are read before the call returns. The caller answers for the
        // memory.
        let code = unsafe {
            (open.table.matmul)(
                open.handle,
                self.desc.raw,
                bytes_of(&operands.alpha).0,
                a.cast_const(),
                self.a.raw,
                b.cast_const(),
                self.b.raw,
                bytes_of(&operands.beta).0,
                d.cast_const(),
                self.d.raw,
                d,
                self.d.raw,
                &raw const choice.algo,
                address(workspace.at),
                workspace.bytes,
                stream.raw().0,
            )
        };
        checked(("cublasLtMatmul", code), || self.shape.to_string())
    }
}

/// The library may answer less than was asked for, and marks what does not work.
fn usable(choices: &[HeuristicResult], count: c_int) -> Vec<HeuristicResult> {
    let count = usize::try_from(count).unwrap_or(0);
    let answered = choices.iter().take(count);
    answered.filter(|choice| choice.state == SUCCESS).copied().collect()
}

/// An address of the device, as the library takes it.
fn address(pointer: DevicePtr) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(pointer.0).unwrap_or(0))
}

fn make(
    (call, shape): (&'static str, GemmShape),
    free: unsafe extern "C" fn(Descriptor) -> c_int,
    create: impl FnOnce(*mut Descriptor) -> c_int,
) -> Result<Owned, GemmError> {
    let mut raw: Descriptor = std::ptr::null_mut();
    checked((call, create(&raw mut raw)), || shape.to_string())?;
    Ok(Owned { raw, free })
}

fn layout(table: &CublasLtTable, shape: GemmShape, (data_type, view): (c_int, Columns)) -> Result<Owned, GemmError> {
    let create = |raw: *mut Descriptor| {
        // SAFETY: the library writes one descriptor.
        unsafe { (table.layout_create)(raw, data_type, view.rows, view.columns, view.stride) }
    };
    make(("cublasLtMatrixLayoutCreate", shape), table.layout_destroy, create)
}

fn preference(table: &CublasLtTable, shape: GemmShape, workspace_bytes: usize) -> Result<Owned, GemmError> {
    let create = |raw: *mut Descriptor| {
        // SAFETY: the library writes one descriptor.
        unsafe { (table.pref_create)(raw) }
    };
    let made = make(("cublasLtMatmulPreferenceCreate", shape), table.pref_destroy, create)?;
    let workspace_bytes = workspace_bytes as u64;
    let sizes = [(PREF_MAX_WORKSPACE_BYTES, bytes_of(&workspace_bytes))];
    let alignments = PREF_MIN_ALIGNMENTS.map(|attribute| (attribute, bytes_of(&ALIGNMENT_BYTES)));
    for (attribute, (at, bytes)) in sizes.into_iter().chain(alignments) {
        // SAFETY: the workspace is eight bytes, an alignment four; both values live.
        let code = unsafe { (table.pref_set)(made.raw, attribute, at, bytes) };
        checked(("cublasLtMatmulPreferenceSetAttribute", code), || shape.to_string())?;
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(weights: WeightLayout) -> GemmShape {
        GemmShape {
            rows: 5,
            outputs: 7,
            inputs: 3,
            weights,
            output: Output::F32,
        }
    }

    /// A product in the library's terms, in f64: `D = op(A) * B`, column by column.
    fn product(views: &Views, a: &[f64], b: &[f64]) -> Vec<f64> {
        let at = |matrix: &[f64], view: Columns, row: u64, column: u64| {
            assert!(row < view.rows && column < view.columns);
            matrix[(column * view.stride as u64 + row) as usize]
        };
        let inner = views.b.rows;
        let mut d = vec![0.0; (views.d.rows * views.d.columns) as usize];
        for column in 0..views.d.columns {
            for row in 0..views.d.rows {
                let terms = (0..inner).map(|k| {
                    let left = match views.transpose_a {
                        OP_T => at(a, views.a, k, row),
                        _ => at(a, views.a, row, k),
                    };
                    left * at(b, views.b, k, column)
                });
                d[(column * views.d.stride as u64 + row) as usize] = terms.sum();
            }
        }
        d
    }

    #[test]
    fn a_product_row_by_row_is_what_the_library_computes_column_by_column() {
        let (rows, outputs, inputs) = (5_usize, 7_usize, 3_usize);
        let x: Vec<f64> = (0..rows * inputs).map(|at| at as f64 - 6.0).collect();
        // Of output o and input i.
        let w = |o: usize, i: usize| (o * 10 + i) as f64;
        let expected: Vec<f64> = (0..rows * outputs)
            .map(|at| {
                (0..inputs)
                    .map(|i| x[at / outputs * inputs + i] * w(at % outputs, i))
                    .sum()
            })
            .collect();
        let outputs_first: Vec<f64> = (0..outputs * inputs).map(|at| w(at / inputs, at % inputs)).collect();
        let inputs_first: Vec<f64> = (0..outputs * inputs).map(|at| w(at % outputs, at / outputs)).collect();
        let views = shape(WeightLayout::OutputsFirst).views();
        assert_eq!(product(&views, &outputs_first, &x), expected);
        let views = shape(WeightLayout::InputsFirst).views();
        assert_eq!(product(&views, &inputs_first, &x), expected);
    }

    #[test]
    fn only_ways_that_the_library_answered_and_that_work_are_kept() {
        let mut choices = [HeuristicResult::default(); CHOICES_MAX];
        choices[1].state = 15;
        assert_eq!(usable(&choices, 3).len(), 2);
        assert_eq!(usable(&choices, 0).len(), 0);
        assert_eq!(usable(&choices, -1).len(), 0);
        assert_eq!(usable(&choices, 100).len(), CHOICES_MAX - 1);
    }
}
