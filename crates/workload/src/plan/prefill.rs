//! The arithmetic of a prompt: floating-point operations, the time at a device's peak, and what is left of its memory.
//!
//! Sources: 2 x parameters for each token is the cost of the matrix products (J. Kaplan et al., "Scaling laws for neural
//! language models", 2020, section 2.1). Attention adds 2 x layers x width x tokens^2 over a causal prompt: two products of
//! `width` for each pair of tokens, half of the pairs, two operations each. Sparse peaks: NVIDIA's data sheet of the
//! H100 gives 3,958 TFLOPS for FP8 "with sparsity", and half of it without.

use super::PlanError;
use super::check::{finite, not_negative, open_share, positive};

/// Data sheets give this many times the dense peak where they count 2:4 structured sparsity.
pub const SPARSE_BY_DENSE: f64 = 2.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prompt {
    pub parameters: f64,
    pub tokens: f64,
    /// Adds attention, whose cost grows with the square of the length.
    pub attention: Option<Attention>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    pub layers: f64,
    /// Query heads times head size.
    pub width: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    /// Floating-point operations a second of dense matrices, in 10^12, in the number format of the weights.
    pub dense_tflops: f64,
    /// Share of the peak that the model reaches: model FLOPs utilisation.
    pub mfu: f64,
}

/// Operations in 10^12.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operations {
    pub linear_tflop: f64,
    pub attention_tflop: f64,
}

impl Operations {
    pub(crate) fn tflop(self) -> f64 {
        self.linear_tflop + self.attention_tflop
    }
}

/// # Errors
/// An input is not above 0.
pub fn operations(prompt: Prompt) -> Result<Operations, PlanError> {
    let tokens = positive("the prompt's length", prompt.tokens)?;
    let linear = 2.0 * positive("the number of parameters", prompt.parameters)? * tokens;
    let attention = match prompt.attention {
        Some(shape) => {
            let layers = positive("the number of layers", shape.layers)?;
            2.0 * layers * positive("the attention's width", shape.width)? * tokens * tokens
        }
        None => 0.0,
    };
    finite("the number of operations", linear + attention)?;
    Ok(Operations {
        linear_tflop: linear / 1e12,
        attention_tflop: attention / 1e12,
    })
}

/// Seconds of a prompt at the dense peak, and at twice that: what a sparse peak of a data sheet would promise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillTime {
    pub dense_s: f64,
    pub at_sparse_peak_s: f64,
}

/// # Errors
/// A peak is not above 0, or the share of it is not between 0 and 1.
pub fn time(operations: Operations, device: Device) -> Result<PrefillTime, PlanError> {
    let peak = positive("the dense peak", device.dense_tflops)?;
    let dense_s = operations.tflop() / (peak * open_share("the share of the peak", device.mfu)?);
    Ok(PrefillTime {
        dense_s: finite("the time of the prompt", dense_s)?,
        at_sparse_peak_s: dense_s / SPARSE_BY_DENSE,
    })
}

/// The factor that a percentage on top makes.
///
/// # Errors
/// The percentage is negative.
pub fn with_extra(percent: f64) -> Result<f64, PlanError> {
    Ok(1.0 + not_negative("what is added to the time", percent)? / 100.0)
}

/// What weights leave of the memory of the devices that share them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryFit {
    pub weights_gb: f64,
    pub memory_gb: f64,
    pub free_gb: f64,
}

/// Gigabytes are 10^9 bytes.
///
/// # Errors
/// An input is not above 0, or the weights do not fit.
pub fn memory_fit(weights_gb: f64, memory_gb: f64) -> Result<MemoryFit, PlanError> {
    let weights_gb = positive("the size of the weights", weights_gb)?;
    let memory_gb = positive("the size of the memory", memory_gb)?;
    match not_negative("the free memory", memory_gb - weights_gb) {
        Ok(free_gb) => Ok(MemoryFit {
            weights_gb,
            memory_gb,
            free_gb,
        }),
        Err(_) => Err(PlanError::WeightsDoNotFit { weights_gb, memory_gb }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: Prompt = Prompt {
        parameters: 70e9,
        tokens: 512.0,
        attention: None,
    };

    #[test]
    fn attention_grows_with_the_square_of_the_length() {
        let shape = Attention {
            layers: 80.0,
            width: 8192.0,
        };
        let of = |tokens: f64| {
            let attention = Some(shape);
            operations(Prompt {
                tokens,
                attention,
                ..PROMPT
            })
            .unwrap()
        };
        let (short, long) = (of(1_000.0), of(10_000.0));
        assert!((long.attention_tflop / short.attention_tflop - 100.0).abs() < 1e-9);
        assert!((long.linear_tflop / short.linear_tflop - 10.0).abs() < 1e-9);
        // 2 x 80 x 8192 x 10,000^2.
        assert!((long.attention_tflop - 131.072).abs() < 1e-9);
    }

    #[test]
    fn bad_inputs_are_typed_errors() {
        let good = operations(PROMPT).unwrap();
        let device = Device {
            dense_tflops: 1979.0,
            mfu: 0.5,
        };
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(operations(Prompt { tokens: bad, ..PROMPT }).is_err());
            assert!(
                operations(Prompt {
                    parameters: bad,
                    ..PROMPT
                })
                .is_err()
            );
            assert!(
                time(
                    good,
                    Device {
                        dense_tflops: bad,
                        ..device
                    }
                )
                .is_err()
            );
            assert!(time(good, Device { mfu: bad, ..device }).is_err());
            assert!(memory_fit(bad, 80.0).is_err());
        }
        assert!(time(good, Device { mfu: 1.0, ..device }).is_err());
        assert!(matches!(
            memory_fit(140.0, 80.0),
            Err(PlanError::WeightsDoNotFit { .. })
        ));
    }
}
