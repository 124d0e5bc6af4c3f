//! The own kernel: sums of a fixed order, whatever the number of rows.

use std::sync::Arc;

use cuda::Stream;

use super::{Job, Multiply};
use crate::error::WorkError;
use crate::kernels::Kernels;
use crate::kernels::calls::Product;

#[derive(Clone, Debug)]
pub(super) struct OwnProducts {
    pub kernels: Arc<Kernels>,
}

impl Multiply for OwnProducts {
    fn enqueue(&self, stream: &Stream, job: &Job) -> Result<(), WorkError> {
        let product = Product {
            x: job.x,
            w: job.weights,
            bias: job.bias,
            out: job.out,
            rows: job.rows,
            columns: job.outputs,
            depth: job.inputs,
            output: job.output,
        };
        Ok(self.kernels.launch(stream, &product.call()?)?)
    }
}
