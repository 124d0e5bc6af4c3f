//! What ptxas says about a kernel: registers, spills, stack. A kernel that spills or has a stack is refused by the checks,
//! because it means that an array which should be in registers is in memory.

use std::collections::BTreeMap;

use thiserror::Error;

/// Registers of a multiprocessor, on every GPU in reach (CUDA C++ programming guide, compute capabilities 8.0 to 12.0). A
/// block with more cannot start.
pub const REGISTERS_MAX: u32 = 65_536;

/// The resources of one kernel on one architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub registers: u32,
    pub stack_bytes: u32,
    pub spill_store_bytes: u32,
    pub spill_load_bytes: u32,
}

/// What is wrong with a kernel's resources: the kernel's source, or a new compiler.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ResourceError {
    #[error("the compiler's log has no resources of kernel `{entry}`; does this NVRTC still take --ptxas-options=-v?")]
    Missing { entry: String },
    #[error("kernel `{entry}` spills registers: {stores} bytes stored, {loads} bytes loaded; make it need fewer")]
    Spills { entry: String, stores: u32, loads: u32 },
    #[error("kernel `{entry}` has a stack of {bytes} bytes; an array of it is indexed by a variable")]
    Stack { entry: String, bytes: u32 },
    #[error(
        "kernel `{entry}` needs {registers} registers for each of {threads} threads, more than the {REGISTERS_MAX} of a multiprocessor"
    )]
    Registers {
        entry: String,
        registers: u32,
        threads: u32,
    },
}

impl Resources {
    /// Refuses what no kernel here may have.
    ///
    /// # Errors
    /// The first [`ResourceError`].
    pub fn check(self, entry: &str, threads: u32) -> Result<(), ResourceError> {
        let entry = entry.to_owned();
        if self.spill_store_bytes > 0 || self.spill_load_bytes > 0 {
            return Err(ResourceError::Spills {
                entry,
                stores: self.spill_store_bytes,
                loads: self.spill_load_bytes,
            });
        }
        if self.stack_bytes > 0 {
            return Err(ResourceError::Stack {
                entry,
                bytes: self.stack_bytes,
            });
        }
        if self.registers.saturating_mul(threads) > REGISTERS_MAX {
            return Err(ResourceError::Registers {
                entry,
                registers: self.registers,
                threads,
            });
        }
        Ok(())
    }
}

/// The resources of every entry in a log that `--ptxas-options=-v` wrote. Lines that are not understood are skipped: the
/// caller asks for the entries that it knows.
pub fn parse(log: &str) -> BTreeMap<String, Resources> {
    let mut found: BTreeMap<String, Resources> = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            found.insert(name.clone(), Resources::default());
            current = Some(name);
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            // Of a function that is not inlined there are properties, too. They count for nobody's entry.
            let name = name.trim();
            current = found.contains_key(name).then(|| name.to_owned());
        } else if let Some(resources) = current.as_ref().and_then(|name| found.get_mut(name)) {
            read_line(line, resources);
        }
    }
    found
}

fn read_line(line: &str, resources: &mut Resources) {
    for part in line.split(',') {
        let before = |unit: &str| {
            let (number, _) = part.split_once(unit)?;
            number.split_whitespace().next_back()?.parse::<u32>().ok()
        };
        if let Some(bytes) = before("bytes stack frame") {
            resources.stack_bytes = bytes;
        } else if let Some(bytes) = before("bytes spill stores") {
            resources.spill_store_bytes = bytes;
        } else if let Some(bytes) = before("bytes spill loads") {
            resources.spill_load_bytes = bytes;
        } else if let Some(registers) = before("registers") {
            resources.registers = registers;
        }
    }
}

/// The resources of one entry.
///
/// # Errors
/// [`ResourceError::Missing`].
pub(crate) fn of_entry(log: &str, entry: &str) -> Result<Resources, ResourceError> {
    let missing = || ResourceError::Missing {
        entry: entry.to_owned(),
    };
    // A log without registers is one that was not understood.
    parse(log)
        .get(entry)
        .copied()
        .filter(|resources| resources.registers > 0)
        .ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As NVRTC 13.0.88 writes it.
    const LOG: &str = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_combine' for 'sm_90a'
ptxas info    : Function properties for decode_combine
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
ptxas info    : Compiling entry function 'decode_attention' for 'sm_90a'
ptxas info    : Function properties for decode_attention
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size
";

    #[test]
    fn a_log_is_read_entry_by_entry() {
        let combine = of_entry(LOG, "decode_combine").unwrap();
        assert_eq!(
            combine,
            Resources {
                registers: 32,
                ..Resources::default()
            }
        );
        assert!(combine.check("decode_combine", 128).is_ok());
        let decode = of_entry(LOG, "decode_attention").unwrap();
        assert_eq!(
            decode,
            Resources {
                registers: 255,
                stack_bytes: 16,
                spill_store_bytes: 4,
                spill_load_bytes: 8
            }
        );
        assert!(matches!(
            decode.check("x", 128),
            Err(ResourceError::Spills {
                stores: 4,
                loads: 8,
                ..
            })
        ));
        assert!(matches!(of_entry(LOG, "gone"), Err(ResourceError::Missing { .. })));
        assert!(of_entry("", "decode_combine").is_err());
    }

    #[test]
    fn each_limit_is_kept() {
        let with_stack = Resources {
            stack_bytes: 8,
            ..Resources::default()
        };
        assert!(matches!(
            with_stack.check("x", 1),
            Err(ResourceError::Stack { bytes: 8, .. })
        ));
        let registers = |registers| Resources {
            registers,
            ..Resources::default()
        };
        assert!(registers(128).check("x", 512).is_ok());
        assert!(registers(129).check("x", 512).is_err());
    }
}
