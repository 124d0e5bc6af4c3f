//! Compares each kernel with the host, on the shapes of the table. One code for the tests on the false driver, for
//! `doctor --gpu` and for the gate in front of an engine.
//!
//! A check looks at the largest error and at the mean: one wholly wrong value of 4,096 leaves the mean below most limits. Sums
//! that must not depend on the batch are computed in two batches, whose bits are compared.

mod attention;
mod bytes;
mod data;
mod paged;
mod product;
mod rope;
mod rows;
mod sampling;

use std::collections::BTreeMap;

use super::attention_shape::{AttentionShape, HeadDim};
use super::calls::Call;
use super::compile::{KernelError, Target};
use super::driver::{self, Device, DeviceMemory, Stream};
use super::loaded::Kernels;
use super::shapes::AttentionCase;
use super::table::KernelId;
use data::Random;

/// Checks that a caller may run in a process of its own: an illegal address makes a device useless for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Rows,
    Rope,
    Prefill,
    Decode,
    Product,
    Bytes,
    Sampling,
}

impl Group {
    pub const ALL: [Group; 7] = [
        Group::Rows,
        Group::Rope,
        Group::Prefill,
        Group::Decode,
        Group::Product,
        Group::Bytes,
        Group::Sampling,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Group::Rows => "rows",
            Group::Rope => "rope",
            Group::Prefill => "prefill",
            Group::Decode => "decode",
            Group::Product => "product",
            Group::Bytes => "bytes",
            Group::Sampling => "sampling",
        }
    }

    /// Runs the group's checks. A wrong result is an outcome and no error.
    ///
    /// # Errors
    /// A kernel could not be compiled or run.
    pub fn run(self, bench: &mut Bench<'_>, extent: Extent, seed: u64) -> Result<Vec<Outcome>, KernelError> {
        let mut run = Run {
            bench,
            extent,
            random: Random::new(seed),
            outcomes: Vec::new(),
        };
        match self {
            Group::Rows => rows::check(&mut run)?,
            Group::Rope => rope::check(&mut run)?,
            Group::Prefill => attention::check_prefill(&mut run)?,
            Group::Decode => attention::check_decode(&mut run)?,
            Group::Product => product::check(&mut run)?,
            Group::Bytes => bytes::check(&mut run)?,
            Group::Sampling => sampling::check(&mut run)?,
        }
        Ok(run.outcomes)
    }
}

/// How much is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// One shape of each kernel, for the attention that a model has.
    Gate(AttentionShape),
    Whole,
}

/// What a result may differ by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// `|got - want| <= absolute + relative * |want|` for every value.
    pub absolute: f64,
    pub relative: f64,
    /// Of the squares' sum: error by result.
    pub nmse: f64,
}

impl Limit {
    pub(crate) const EXACT: Limit = Limit {
        absolute: 0.0,
        relative: 0.0,
        nmse: 0.0,
    };
    /// f32 with the device's approximations of functions, whose largest errors are two units in the last place (PTX ISA,
    /// `ex2.approx`, `rcp.approx`, `rsqrt.approx`), and sums of a few thousand.
    pub(crate) const F32: Limit = Limit {
        absolute: 1e-5,
        relative: 1e-5,
        nmse: 1e-10,
    };
    /// Rounded once to bf16: half a unit in the last of 8 bits is at most 2^-8 of the value. An eighth more for the f32 before.
    /// With errors spread evenly over half a unit the mean of the squares is 2e-6 to 3e-6 of the results'; eight values alone
    /// were seen at 4.1e-6.
    pub(crate) const BF16: Limit = Limit {
        absolute: 1e-5,
        relative: 4.4e-3,
        nmse: 8e-6,
    };
}

/// What one check of one kernel found.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub kernel: KernelId,
    pub shape: String,
    pub largest_error: f64,
    pub nmse: f64,
    /// The value that exceeds its limit most, or comes nearest to it.
    pub worst_index: usize,
    pub limit: Limit,
    pub is_right: bool,
}

impl Outcome {
    fn compare((kernel, shape): (KernelId, String), got: &[f64], want: &[f64], limit: Limit) -> Self {
        let (mut largest_error, mut worst_index, mut worst_share) = (0.0f64, 0, 0.0f64);
        let (mut errors, mut squares) = (0.0, 0.0);
        for (index, (got, want)) in got.iter().zip(want).enumerate() {
            // Equal infinities are equal; a NaN is never right.
            let error = if got == want { 0.0 } else { (got - want).abs() };
            let error = if error.is_nan() { f64::INFINITY } else { error };
            let allowed = limit.absolute + limit.relative * want.abs();
            let share = if error == 0.0 {
                0.0
            } else {
                error / allowed.max(f64::MIN_POSITIVE)
            };
            if share > worst_share {
                (worst_share, worst_index) = (share, index);
            }
            largest_error = largest_error.max(error);
            errors += error * error;
            squares += want * want;
        }
        let nmse = if errors == 0.0 {
            0.0
        } else {
            errors / squares.max(f64::MIN_POSITIVE)
        };
        Self {
            kernel,
            shape,
            largest_error,
            nmse,
            worst_index,
            limit,
            is_right: got.len() == want.len() && worst_share <= 1.0 && nmse <= limit.nmse,
        }
    }
}

/// A device with the kernels that the checks have needed so far.
pub struct Bench<'a> {
    device: &'a Device,
    target: &'a Target<'a>,
    loaded: BTreeMap<AttentionShape, Kernels>,
    stream: Stream,
}

impl std::fmt::Debug for Bench<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench")
            .field("loaded", &self.loaded.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Bench<'a> {
    /// # Errors
    /// The device has no stream to give.
    pub fn new(device: &'a Device, target: &'a Target<'a>) -> Result<Self, KernelError> {
        Ok(Self {
            device,
            target,
            loaded: BTreeMap::new(),
            stream: device.stream()?,
        })
    }

    fn upload(&self, bytes: &[u8]) -> Result<DeviceMemory, KernelError> {
        Ok(driver::upload(self.device, &self.stream, bytes)?)
    }

    fn download(&self, memory: &DeviceMemory) -> Result<Vec<u8>, KernelError> {
        Ok(driver::download(self.device, &self.stream, memory)?)
    }

    fn launch(&mut self, shape: AttentionShape, call: &Call) -> Result<(), KernelError> {
        if !self.loaded.contains_key(&shape) {
            let kernels = Kernels::load(self.device, self.target, shape)?;
            self.loaded.insert(shape, kernels);
        }
        let kernel = call.kernel;
        let kernels = self.loaded.get(&shape).ok_or(KernelError::NotLoaded { kernel })?;
        kernels.launch(&self.stream, call)
    }
}

/// A running group.
struct Run<'b, 'a> {
    bench: &'b mut Bench<'a>,
    extent: Extent,
    random: Random,
    outcomes: Vec<Outcome>,
}

impl Run<'_, '_> {
    /// The shapes of a list that this extent asks for.
    fn shapes<T: Copy>(&self, all: &[T]) -> Vec<T> {
        match self.extent {
            Extent::Gate(_) => all.iter().take(1).copied().collect(),
            Extent::Whole => all.to_vec(),
        }
    }

    /// The gate checks the attention of its model and no other.
    fn attention_case(&self, case: AttentionCase) -> AttentionCase {
        match self.extent {
            Extent::Gate(shape) => AttentionCase {
                head_dim: shape.head_dim.values() as usize,
                group: shape.group as usize,
                ..case
            },
            Extent::Whole => case,
        }
    }

    /// For kernels that are the same for every shape of attention.
    fn any_shape(&self) -> AttentionShape {
        match self.extent {
            Extent::Gate(shape) => shape,
            Extent::Whole => AttentionShape {
                head_dim: HeadDim::D64,
                group: 3,
            },
        }
    }

    fn upload(&self, bytes: &[u8]) -> Result<DeviceMemory, KernelError> {
        self.bench.upload(bytes)
    }

    /// Launches a kernel that is the same for every shape, and reads what it wrote.
    fn result(&mut self, call: &Call, out: &DeviceMemory) -> Result<Vec<u8>, KernelError> {
        let shape = self.any_shape();
        self.bench.launch(shape, call)?;
        self.bench.download(out)
    }

    fn compare(&mut self, of: (KernelId, String), got: &[f64], want: &[f64], limit: Limit) {
        self.outcomes.push(Outcome::compare(of, got, want, limit));
    }

    /// Bytes that must be equal.
    fn same(&mut self, of: (KernelId, String), got: &[u8], want: &[u8]) {
        self.compare(of, &data::exact_values(got), &data::exact_values(want), Limit::EXACT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(got: &[f64], want: &[f64], limit: Limit) -> Outcome {
        Outcome::compare((KernelId::Embed, String::new()), got, want, limit)
    }

    #[test]
    fn one_wrong_value_of_many_is_named() {
        let want = vec![1.0; 4_096];
        let mut got = want.clone();
        got[1_234] = 0.0;
        let outcome = compare(
            &got,
            &want,
            Limit {
                nmse: 5e-4,
                ..Limit::BF16
            },
        );
        assert!(!outcome.is_right && outcome.nmse < 5e-4);
        assert_eq!((outcome.worst_index, outcome.largest_error), (1_234, 1.0));
    }

    #[test]
    fn what_is_no_number_is_wrong_and_rounding_is_right() {
        assert!(!compare(&[f64::NAN], &[1.0], Limit::BF16).is_right);
        assert!(!compare(&[f64::NAN], &[f64::NAN], Limit::BF16).is_right);
        assert!(compare(&[1.001], &[1.0], Limit::BF16).is_right);
        assert!(!compare(&[1.001], &[1.0], Limit::EXACT).is_right);
        assert!(
            !compare(&[1.0], &[1.0, 1.0], Limit::BF16).is_right,
            "a length is a part of the result"
        );
        assert!(compare(&[f64::NEG_INFINITY, 0.0], &[f64::NEG_INFINITY, 0.0], Limit::EXACT).is_right);
    }
}
