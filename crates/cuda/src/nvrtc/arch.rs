//! Architectures that kernels are compiled for.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::device::ComputeCapability;

/// Kernels use asynchronous copies and bf16 matrix products, which begin here (PTX ISA, `cp.async`, `mma`).
const OLDEST: ComputeCapability = ComputeCapability { major: 8, minor: 0 };

/// Why there is no architecture.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ArchError {
    #[error("a GPU of compute capability {0} is too old: kernels need 8.0 (A100, RTX 30) or later")]
    TooOld(ComputeCapability),
    #[error("`{0}` is no architecture; examples are sm_80, sm_90a and sm_120")]
    Unknown(String),
}

/// What a target has besides its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Variant {
    Plain,
    /// `a`: everything of exactly this compute capability. Its code runs nowhere else, as machine code does anyway.
    Accelerated,
}

/// `sm_80`, `sm_90a`: machine code for one architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    major: u32,
    minor: u32,
    variant: Variant,
}

impl Arch {
    /// The architecture of a GPU. Hopper and the data centre's Blackwell have the variant `a`, for which the gate of CI
    /// compiles, too.
    ///
    /// # Errors
    /// [`ArchError::TooOld`].
    pub fn of(capability: ComputeCapability) -> Result<Self, ArchError> {
        if capability < OLDEST {
            return Err(ArchError::TooOld(capability));
        }
        let ComputeCapability { major, minor } = capability;
        let variant = match major {
            9 | 10 => Variant::Accelerated,
            _ => Variant::Plain,
        };
        Ok(Self { major, minor, variant })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)?;
        match self.variant {
            Variant::Plain => Ok(()),
            Variant::Accelerated => f.write_str("a"),
        }
    }
}

impl FromStr for Arch {
    type Err = ArchError;

    /// The last digit is the minor number: `sm_120` is 12.0.
    fn from_str(text: &str) -> Result<Self, ArchError> {
        let unknown = || ArchError::Unknown(text.to_owned());
        let number = text.strip_prefix("sm_").ok_or_else(unknown)?;
        let (digits, variant) = match number.strip_suffix('a') {
            Some(digits) => (digits, Variant::Accelerated),
            None => (number, Variant::Plain),
        };
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(unknown());
        }
        let number: u32 = digits.parse().map_err(|_| unknown())?;
        let (major, minor) = (number / 10, number % 10);
        let capability = ComputeCapability { major, minor };
        if capability < OLDEST {
            return Err(ArchError::TooOld(capability));
        }
        Ok(Self { major, minor, variant })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(major: u32, minor: u32) -> Result<String, ArchError> {
        Arch::of(ComputeCapability { major, minor }).map(|arch| arch.to_string())
    }

    #[test]
    fn a_gpu_gets_the_architecture_that_ci_compiles_for() {
        let names = [
            (8, 0, "sm_80"),
            (8, 9, "sm_89"),
            (9, 0, "sm_90a"),
            (10, 0, "sm_100a"),
            (12, 0, "sm_120"),
        ];
        for (major, minor, name) in names {
            assert_eq!(of(major, minor).as_deref(), Ok(name));
        }
    }

    #[test]
    fn a_gpu_without_the_instructions_that_kernels_use_is_refused() {
        assert!(matches!(of(7, 5), Err(ArchError::TooOld(_))));
        assert!(matches!("sm_75".parse::<Arch>(), Err(ArchError::TooOld(_))));
    }

    #[test]
    fn a_name_is_read_as_it_is_written() {
        for name in ["sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120"] {
            assert_eq!(name.parse::<Arch>().map(|arch| arch.to_string()).as_deref(), Ok(name));
        }
        for name in [
            "",
            "sm_",
            "sm_a",
            "90a",
            "compute_90",
            "sm_9x",
            "sm_+80",
            "sm_99999999999",
        ] {
            assert!(matches!(name.parse::<Arch>(), Err(ArchError::Unknown(_))), "{name}");
        }
    }
}
