//! The bound that memory bandwidth puts on decoding: a step reads every weight once, and the KV of every sequence in it.
//!
//! Source: bandwidth by weights is the roofline model (S. Williams et al., "Roofline",
//! Communications of the ACM 52, 2009) where arithmetic is not the bound. KV reads are added for batches.

use super::PlanError;
use super::check::{finite, not_negative, positive};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeStep {
    pub weights_bytes: f64,
    /// Bytes a second.
    pub bandwidth: f64,
    /// Sequences in the step.
    pub batch: f64,
    /// KV bytes of one sequence.
    pub kv_bytes_each: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeBound {
    pub step_s: f64,
    /// Tokens a second of one sequence: the reciprocal of the step.
    pub tokens_each: f64,
    /// Tokens a second of the batch.
    pub tokens_all: f64,
}

/// # Errors
/// An input is not above 0 (the KV may be 0).
pub fn bound(step: DecodeStep) -> Result<DecodeBound, PlanError> {
    let weights = positive("the size of the weights", step.weights_bytes)?;
    let batch = positive("the batch", step.batch)?;
    let kv = batch * not_negative("the KV of a sequence", step.kv_bytes_each)?;
    let step_s = finite(
        "the time of a step",
        (weights + kv) / positive("the bandwidth", step.bandwidth)?,
    )?;
    Ok(DecodeBound {
        step_s,
        tokens_each: 1.0 / step_s,
        tokens_all: batch / step_s,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: DecodeStep = DecodeStep {
        weights_bytes: 16e9,
        bandwidth: 600e9,
        batch: 1.0,
        kv_bytes_each: 0.0,
    };

    #[test]
    fn a_batch_shares_the_weights_and_not_the_kv() {
        let (alone, batch) = (
            bound(ALONE).unwrap(),
            bound(DecodeStep {
                batch: 16.0,
                kv_bytes_each: 1e9,
                ..ALONE
            })
            .unwrap(),
        );
        assert!((batch.step_s / alone.step_s - 2.0).abs() < 1e-12);
        assert!((batch.tokens_all / alone.tokens_all - 8.0).abs() < 1e-12);
    }

    #[test]
    fn bad_inputs_are_typed_errors() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(
                bound(DecodeStep {
                    weights_bytes: bad,
                    ..ALONE
                })
                .is_err()
            );
            assert!(
                bound(DecodeStep {
                    bandwidth: bad,
                    ..ALONE
                })
                .is_err()
            );
            assert!(bound(DecodeStep { batch: bad, ..ALONE }).is_err());
        }
        assert!(
            bound(DecodeStep {
                kv_bytes_each: -1.0,
                ..ALONE
            })
            .is_err()
        );
    }
}
