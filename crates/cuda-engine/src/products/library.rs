//! Products by cuBLASLt, in plans that were made at the opening. A shape without a plan is not computed here.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda::cublaslt::{GemmPlan, GemmShape, Operands, Output as Rounding, WeightLayout, Workspace};
use cuda::{DevicePtr, Stream};

use super::buckets::RowBuckets;
use super::{Job, Multiply};
use crate::error::WorkError;
use crate::kernels::Kernels;
use crate::kernels::calls::{GatherRows, Output};

/// What a plan works with besides its matrices.
#[derive(Clone, Debug)]
pub(super) struct Surroundings {
    pub kernels: Arc<Kernels>,
    pub workspace: Workspace,
    /// As many u32 zeros as a step has rows.
    pub zeros: DevicePtr,
}

#[derive(Debug)]
pub(super) struct LibraryProducts {
    pub surroundings: Surroundings,
    pub buckets: RowBuckets,
    pub plans: BTreeMap<GemmShape, GemmPlan>,
}

/// The shape of a job with so many rows.
pub(super) fn shape_of(job: &Job, rows: u32) -> GemmShape {
    GemmShape {
        rows,
        outputs: job.outputs,
        inputs: job.inputs,
        weights: WeightLayout::OutputsFirst,
        output: match job.output {
            Output::Bf16 => Rounding::Bf16,
            Output::F32 | Output::AddF32 => Rounding::F32,
        },
    }
}

impl LibraryProducts {
    /// The plan that computes a job.
    fn plan(&self, job: &Job) -> Option<&GemmPlan> {
        self.plans.get(&shape_of(job, self.buckets.of(job.rows)?))
    }

    pub fn has(&self, job: &Job) -> bool {
        self.plan(job).is_some()
    }
}

impl Multiply for LibraryProducts {
    /// A job without a plan does nothing: ask [`LibraryProducts::has`] first.
    fn enqueue(&self, stream: &Stream, job: &Job) -> Result<(), WorkError> {
        match self.plan(job) {
            Some(plan) => run(&self.surroundings, plan, (stream, job)),
            None => Ok(()),
        }
    }
}

/// Computes a job with all rows of a plan. The library adds to what is in the outputs, so a bias is put there first.
pub(super) fn run(
    surroundings: &Surroundings,
    plan: &GemmPlan,
    (stream, job): (&Stream, &Job),
) -> Result<(), WorkError> {
    if let Some(bias) = biased(job) {
        let broadcast = GatherRows {
            x: bias,
            rows: surroundings.zeros,
            out: job.out,
            count: plan.shape().rows,
            columns: job.outputs,
        };
        surroundings.kernels.launch(stream, &broadcast.call()?)?;
    }
    let adds = job.output == Output::AddF32 || job.bias.is_some();
    let operands = Operands {
        weights: job.weights,
        inputs: job.x,
        outputs: job.out,
        alpha: 1.0,
        beta: if adds { 1.0 } else { 0.0 },
    };
    Ok(plan.run(stream, &operands, surroundings.workspace)?)
}

/// The bias that has to be put into the outputs.
fn biased(job: &Job) -> Option<DevicePtr> {
    job.bias.filter(|_| job.output == Output::F32)
}

/// Jobs that this way can compute: a bias needs outputs of f32 that hold nothing else, in whole groups of four.
pub(super) fn can_compute(job: &Job) -> bool {
    job.bias.is_none() || (job.output == Output::F32 && job.outputs.is_multiple_of(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(output: Output, bias: Option<DevicePtr>) -> Job {
        let at = DevicePtr(4_096);
        Job {
            weights: at,
            bias,
            x: at,
            out: at,
            rows: 3,
            outputs: 960,
            inputs: 576,
            output,
        }
    }

    #[test]
    fn a_bias_needs_outputs_that_hold_nothing_else() {
        let bias = Some(DevicePtr(64));
        assert!(can_compute(&job(Output::AddF32, None)) && can_compute(&job(Output::Bf16, None)));
        assert!(can_compute(&job(Output::F32, bias)));
        assert!(!can_compute(&job(Output::AddF32, bias)) && !can_compute(&job(Output::Bf16, bias)));
    }

    #[test]
    fn adding_and_writing_share_a_plan() {
        let shape = |output| shape_of(&job(output, None), 4);
        assert_eq!(shape(Output::F32), shape(Output::AddF32));
        assert_ne!(shape(Output::F32), shape(Output::Bf16));
    }
}
