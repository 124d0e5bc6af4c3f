//! Owns what a test asks of the double itself: the report, a new beginning, a meeting of threads, and work of other test libraries.

use std::ffi::{CStr, c_int};

use crate::codes::Code;
use crate::driver::{self, Needs};
use crate::outside_abi::OutsideWork;
use crate::report::{self, Report};
use crate::settings::{BadVariable, Settings};
use crate::work::{Outside, Work};

/// What was done, left and found until now.
pub fn report() -> Report {
    driver::with_state(|state| report::of(state))
}

/// A new driver that reads these variables and not the environment. Every handle of before is gone; its pinned memory stays mapped.
/// No other thread may be in a call.
pub fn reset_with(variables: &[(&str, &str)]) -> Result<(), BadVariable> {
    let lookup = |name: &str| {
        variables
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| (*value).to_owned())
    };
    let settings = Settings::read(&lookup)?;
    driver::with_state(|state| state.renew(Ok(settings)));
    Ok(())
}

/// Writes the report as at the end of the process. Answers how many findings and faults there are.
// SAFETY: no other library has this name.
#[unsafe(no_mangle)]
pub extern "C" fn false_cuda_report() -> c_int {
    driver::with_state(|state| {
        report::write(state);
        let report = report::of(state);
        c_int::try_from(report.findings.len() + report.faults.len()).unwrap_or(c_int::MAX)
    })
}

/// As `reset_with`, with the variables of the environment.
// SAFETY: no other library has this name.
#[unsafe(no_mangle)]
pub extern "C" fn false_cuda_reset() {
    driver::with_state(|state| state.renew(Settings::from_environment()));
}

/// Threads that call this one after the other are ordered, as by a lock: the later one knows what the earlier one knew. Only of use
/// with `FALSE_CUDA_HOST_CLOCKS=separate`.
// SAFETY: no other library has this name.
#[unsafe(no_mangle)]
pub extern "C" fn false_cuda_meet() {
    driver::with_state(|state| state.meet());
}

/// Takes the work over: whatever the answer is, `release` will be called.
///
/// # Safety
/// `work` is what `outside_abi.rs` says, and its pointers are good during the call.
// SAFETY: no other library has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn false_cuda_outside(stream: u64, work: *const OutsideWork) -> c_int {
    // SAFETY: the caller gives a work whose name is a C string and whose accesses are as many as it says.
    let outside = unsafe {
        let work = &*work;
        let accesses = match work.access_count {
            0 => Vec::new(),
            count => std::slice::from_raw_parts(work.accesses, count).to_vec(),
        };
        Outside {
            name: CStr::from_ptr(work.name).to_string_lossy().into_owned(),
            poll: work.poll,
            release: work.release,
            context: work.context,
            accesses,
            is_repeatable: work.is_repeatable != 0,
        }
    };
    driver::call("false_cuda_outside", Needs::Initialised, move |driver| {
        let stream = driver.stream(stream)?;
        let device = driver.streams[stream].device;
        driver.device_answer(device)?;
        for access in outside.accesses.iter().filter(|access| access.bytes > 0) {
            if driver.allocation_of(access.at, access.bytes).is_none() {
                driver.misuse(format!(
                    "{}: {} bytes at {:#x} are not allocated",
                    outside.name, access.bytes, access.at
                ));
                return Err(Code::INVALID_VALUE);
            }
        }
        driver.submit(stream, Work::Outside(outside.into()))
    })
}
