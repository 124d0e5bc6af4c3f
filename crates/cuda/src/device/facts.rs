//! What a device is: read once, without a context.

use std::ffi::{c_char, c_int};
use std::fmt;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use serde::{Serialize, Serializer};

use crate::calls;
use crate::error::{CudaError, check};
use crate::loader::{DriverDecision, Libraries, Version};

/// The driver writes no longer names than this with their end (`cuDeviceGetName` cuts).
const NAME_BYTES: usize = 256;
/// Release of the kernel's half of the driver, where it is loaded as a module.
const RELEASE_FILE: &str = "/sys/module/nvidia/version";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ComputeCapability {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Serialize for ComputeCapability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceFacts {
    /// Its number among the visible devices.
    pub ordinal: u32,
    pub name: String,
    /// As `nvidia-smi -L` prints it: `GPU-...`, or `MIG-...` for a slice of a GPU.
    pub uuid: String,
    pub compute_capability: ComputeCapability,
    pub multiprocessors: u32,
    /// Of one block, after a function has asked for it.
    pub shared_bytes_max: u32,
    pub memory_bytes: u64,
    /// The newest CUDA that the driver knows.
    pub driver_cuda: Option<Version>,
    /// `580.82.07`, where the system says it.
    pub driver_release: Option<String>,
    pub has_ecc: bool,
    pub is_mig: bool,
}

impl fmt::Display for DeviceFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory_mib = self.memory_bytes >> 20;
        let ecc = if self.has_ecc { "ECC" } else { "no ECC" };
        let mig = if self.is_mig { ", a MIG slice" } else { "" };
        write!(
            f,
            "{} ({}), compute capability {}, {} SMs, {memory_mib} MiB, {ecc}{mig}",
            self.name, self.uuid, self.compute_capability, self.multiprocessors
        )?;
        match &self.driver_release {
            Some(release) => write!(f, ", driver {release}"),
            None => Ok(()),
        }
    }
}

impl DeviceFacts {
    /// Of every visible device; none without a driver. A device that does not answer is left out, with a line in the log.
    pub fn of_all(libraries: &Libraries) -> Vec<Self> {
        let count = match libraries.report().driver {
            DriverDecision::Ready { devices, .. } => devices,
            _ => 0,
        };
        let answers = (0..count).map(|ordinal| Self::read(ordinal).map(|(_, facts)| facts));
        answers
            .filter_map(|facts| {
                facts
                    .inspect_err(|error| tracing::warn!(%error, "a GPU does not answer"))
                    .ok()
            })
            .collect()
    }

    /// The driver has been found and is initialised.
    pub(super) fn read(ordinal: u32) -> Result<(sys::CUdevice, Self), CudaError> {
        let what = || format!("device {ordinal}");
        let number = c_int::try_from(ordinal);
        let number = number.map_err(|_| CudaError::misuse("cuDeviceGet", "there is no such device", what()))?;
        let mut device: sys::CUdevice = 0;
        // SAFETY: the driver writes one number.
        let answered = unsafe { calls::cuDeviceGet(&raw mut device, number) };
        check("cuDeviceGet", answered, what)?;
        let read = |attribute| read_attribute(device, attribute);
        let name = read_name(device)?;
        let is_mig = is_mig(&name);
        let mut memory_bytes: usize = 0;
        // SAFETY: the driver writes one size.
        let answered = unsafe { calls::cuDeviceTotalMem_v2(&raw mut memory_bytes, device) };
        check("cuDeviceTotalMem", answered, what)?;
        let facts = Self {
            ordinal,
            uuid: read_uuid(device, is_mig)?,
            compute_capability: ComputeCapability {
                major: read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                minor: read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            },
            multiprocessors: read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            memory_bytes: memory_bytes as u64,
            driver_cuda: read_driver_version()?,
            driver_release: std::fs::read_to_string(RELEASE_FILE)
                .ok()
                .map(|text| text.trim().to_owned()),
            has_ecc: read(Attribute::CU_DEVICE_ATTRIBUTE_ECC_ENABLED)? != 0,
            is_mig,
            name,
        };
        Ok((device, facts))
    }
}

fn read_attribute(device: sys::CUdevice, attribute: Attribute) -> Result<u32, CudaError> {
    let mut value: c_int = 0;
    // SAFETY: the driver writes one int.
    let answered = unsafe { calls::cuDeviceGetAttribute(&raw mut value, attribute, device) };
    check("cuDeviceGetAttribute", answered, || format!("{attribute:?}"))?;
    // No attribute that is read here can be negative.
    Ok(u32::try_from(value).unwrap_or(0))
}

fn read_name(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut name: [c_char; NAME_BYTES] = [0; NAME_BYTES];
    // SAFETY: the driver writes at most as many bytes as it is told.
    let answered = unsafe { calls::cuDeviceGetName(name.as_mut_ptr(), NAME_BYTES as c_int, device) };
    check("cuDeviceGetName", answered, || format!("device {device}"))?;
    let bytes: Vec<u8> = name.into_iter().map(unsigned).take_while(|byte| *byte != 0).collect();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn read_uuid(device: sys::CUdevice, is_mig: bool) -> Result<String, CudaError> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the driver writes sixteen bytes.
    let answered = unsafe { calls::cuDeviceGetUuid_v2(&raw mut uuid, device) };
    check("cuDeviceGetUuid", answered, || format!("device {device}"))?;
    Ok(uuid_text(uuid.bytes.map(unsigned), is_mig))
}

fn read_driver_version() -> Result<Option<Version>, CudaError> {
    let mut version: c_int = 0;
    // SAFETY: the driver writes one int.
    let answered = unsafe { calls::cuDriverGetVersion(&raw mut version) };
    check("cuDriverGetVersion", answered, String::new)?;
    Ok(Version::of_cuda(version))
}

/// `char` of C has a sign on some machines and none on others.
#[allow(clippy::unnecessary_cast, reason = "it is a cast where `char` has a sign")]
fn unsigned(byte: c_char) -> u8 {
    byte as u8
}

/// The driver has no attribute for it, and puts it into the name: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
fn is_mig(name: &str) -> bool {
    name.split_whitespace().any(|word| word == "MIG")
}

fn uuid_text(bytes: [u8; 16], is_mig: bool) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let prefix = if is_mig { "MIG" } else { "GPU" };
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("{prefix}-{}", parts.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_writes_it() {
        let bytes = std::array::from_fn(|at| at as u8 * 17);
        assert_eq!(uuid_text(bytes, false), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert!(uuid_text(bytes, true).starts_with("MIG-0011"));
    }

    #[test]
    fn a_slice_of_a_gpu_is_known_by_its_name() {
        assert!(is_mig("NVIDIA A100-SXM4-40GB MIG 1g.5gb"));
        assert!(!is_mig("NVIDIA H200"));
        assert!(!is_mig("MIGHTY GPU"));
    }
}
