//! How a model is run on a device. There is no default, because each value is a decision of the node's configuration.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use engine::{EngineLimits, LoadProgress};
use serde::{Serialize, Serializer};
use thiserror::Error;

use crate::kernels::Target;

/// Where a model is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The processors, until somebody has run the GPU engine on hardware.
    #[default]
    Auto,
    Cpu,
    /// A visible GPU by its number.
    Cuda(u32),
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{0}` is no device; write auto, cpu or cuda:N")]
pub struct UnknownDevice(String);

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        let unknown = || UnknownDevice(text.to_owned());
        match (text, text.strip_prefix("cuda:")) {
            ("auto", _) => Ok(DeviceChoice::Auto),
            ("cpu", _) => Ok(DeviceChoice::Cpu),
            (_, Some(number)) => number.parse().map(DeviceChoice::Cuda).map_err(|_| unknown()),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl Serialize for DeviceChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Which sums a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The own products and one kernel of attention for all rows: equal bits in both phases, in any batch and chunk.
    Invariant,
    /// The fastest kernel for each shape. The last bits of a row depend on the sizes of its step.
    Fast,
}

impl Mode {
    /// Part of the compatibility hash, without blanks. The number after the slash changes with any change of the definition in
    /// `kernels/`.
    ///
    /// Equal bits need equal machine code on equal tensor cores: generations of GPUs add products in different orders ("Accurate
    /// Models of NVIDIA Tensor Cores", arXiv 2512.07004), and a compiler may fuse a product and a sum in two ways. So only equal
    /// GPUs with the same compiler are a pair in invariant mode. The fast mode promises no bits, and unlike GPUs are a pair.
    pub(crate) fn numerics_id(self, target: &Target<'_>) -> String {
        match self {
            Mode::Fast => "cuda-bf16/1".to_owned(),
            Mode::Invariant => format!("cuda-bf16-invariant/1/{}/nvrtc-{}", target.arch, target.nvrtc_version),
        }
    }
}

/// Who computes the products of [`Mode::Fast`]. [`Mode::Invariant`] has its own ones always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductChoice {
    /// The faster one for each shape, by a measurement at the opening. The own one where there is no cuBLASLt. On the false
    /// driver, which knows no speed, it is `Library`.
    Measured,
    /// The own kernels.
    Own,
    /// cuBLASLt wherever it computes the shape.
    Library,
}

/// How much memory KV gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvRoom {
    /// As many blocks as fit, at least one.
    Bytes(u64),
    /// What weights and buffers leave of the free memory, less a reserve for the driver.
    Rest,
}

pub struct CudaOptions<'a> {
    /// The device's number among the visible ones: the N of `cuda:N`.
    pub ordinal: u32,
    pub mode: Mode,
    pub products: ProductChoice,
    pub limits: EngineLimits,
    /// Tokens of a KV block: 16, 32, 64, 128 or 256.
    pub block_tokens: u32,
    pub kv: KvRoom,
    /// How long a step or a copy may take before the device counts as hanging. `None`: longer than any honest step of these limits.
    pub step_limit: Option<Duration>,
    /// Called once, when the device has room for the model.
    pub fits: Option<&'a mut dyn FnMut()>,
    /// Called after each matrix that is on the device.
    pub progress: Option<&'a mut dyn FnMut(LoadProgress)>,
}

impl std::fmt::Debug for CudaOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaOptions")
            .field("ordinal", &self.ordinal)
            .field("mode", &self.mode)
            .field("products", &self.products)
            .field("limits", &self.limits)
            .field("kv", &self.kv)
            .field("step_limit", &self.step_limit)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written_and_others_are_refused() {
        for text in ["auto", "cpu", "cuda:0", "cuda:11"] {
            assert_eq!(
                text.parse::<DeviceChoice>().map(|device| device.to_string()),
                Ok(text.to_owned())
            );
        }
        for text in ["", "cuda", "cuda:", "cuda:-1", "gpu:0", "CPU"] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
    }
}
