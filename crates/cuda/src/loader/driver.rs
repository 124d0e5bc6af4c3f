//! Finds the driver's library and asks it the first questions. Afterwards the functions of `calls.rs` may be used: each has been
//! found, in the very library that the bindings of `cudarc` will take.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::Mutex;

use libloading::os::unix::Library;

use super::decision::{Attempt, DriverAnswers, DriverDecision, Outcome, Reach, decide_driver};
use super::search::{Candidate, Component, Search};
use super::version::Version;
use super::visible::VisibleDevices;
use crate::calls;
use crate::table::{self, function_table};

function_table! {
    /// What is asked before the functions of `calls.rs` may be used.
    DriverTable {
        init = "cuInit": fn(c_uint) -> c_int;
        version = "cuDriverGetVersion": fn(*mut c_int) -> c_int;
        device_count = "cuDeviceGetCount": fn(*mut c_int) -> c_int;
        error_name = "cuGetErrorName": fn(c_int, *mut *const c_char) -> c_int;
    }
}

/// The bindings keep the first library that they find, for the life of the process. So one search of the driver at a time.
static SEARCHING: Mutex<()> = Mutex::new(());

/// Tries the places until one has a driver. The last answer of a library that is no driver stays the reason if there is none.
pub(super) fn find(search: &Search, visible: &VisibleDevices, attempts: &mut Vec<Attempt>) -> DriverDecision {
    let _one_at_a_time = SEARCHING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut decision = DriverDecision::NotFound;
    for candidate in search.candidates(Component::Driver) {
        let (attempt, tried) = attempt(candidate, visible);
        let is_driver = matches!(attempt.outcome, Outcome::Used { .. });
        attempts.push(attempt);
        match tried {
            Some(found) if is_driver => return found,
            Some(found) => decision = found,
            None => {}
        }
    }
    decision
}

fn attempt(candidate: Candidate, visible: &VisibleDevices) -> (Attempt, Option<DriverDecision>) {
    let Candidate { origin, path } = candidate;
    let (file, outcome, found) = match super::open(&path) {
        Err(outcome) => (None, outcome, None),
        Ok(library) => ask(library, &path, visible),
    };
    let attempt = Attempt {
        component: Component::Driver,
        origin,
        path,
        file,
        outcome,
    };
    (attempt, found)
}

fn ask(library: Library, path: &str, visible: &VisibleDevices) -> (Option<String>, Outcome, Option<DriverDecision>) {
    let missing = calls::SYMBOLS
        .iter()
        .find(|name| table::address(&library, name).is_none());
    let table = match (DriverTable::resolve(&library), missing) {
        (Ok(table), None) => table,
        (Err(symbol), _) | (_, Some(&symbol)) => {
            let decision = DriverDecision::SymbolMissing {
                file: path.to_owned(),
                symbol: symbol.to_owned(),
            };
            return (None, Outcome::SymbolMissing { symbol }, Some(decision));
        }
    };
    let file = table::file_of(table.init as usize);
    // A library whose functions were called stays: it may have threads.
    std::mem::forget(library);
    let answers = answers(&table, file.clone());
    let reach = match answers.is_stub() {
        true => Reach::Same,
        false => reach(table.init as usize),
    };
    let decision = decide_driver(&answers, &reach, visible);
    let outcome = match &decision {
        DriverDecision::Stub { .. } => Outcome::Stub,
        _ => Outcome::Used {
            version: answers.version.and_then(Version::of_cuda),
        },
    };
    (file, outcome, Some(decision))
}

fn answers(table: &DriverTable, file: Option<String>) -> DriverAnswers {
    let asked = |call: unsafe extern "C" fn(*mut c_int) -> c_int| {
        let mut value: c_int = 0;
        // SAFETY: the driver writes one int.
        let code = unsafe { call(&raw mut value) };
        (code == 0).then_some(value)
    };
    // SAFETY: the only flag that there is, is none.
    let init = unsafe { (table.init)(0) };
    DriverAnswers {
        file,
        init,
        init_name: table.name_of(init),
        version: asked(table.version),
        devices: match init {
            0 => asked(table.device_count),
            _ => None,
        },
    }
}

impl DriverTable {
    /// The driver's name of one of its codes.
    fn name_of(&self, code: c_int) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the driver writes a pointer to a text that it keeps, or null for a code that it does not know.
        let status = unsafe { (self.error_name)(code, &raw mut text) };
        // SAFETY: as above.
        unsafe { calls::name_from((code, status), text) }
    }
}

/// Does what the bindings will do: it opens their names in their order, and compares. Without the proof that they find
/// something they would panic, and they could find another library than the one that was asked.
fn reach(init: usize) -> Reach {
    let names = ["cuda", "nvcuda"].into_iter().flat_map(cudarc::get_lib_name_candidates);
    for name in names {
        let Ok(library) = table::open(&name) else { continue };
        let address = table::address(&library, "cuInit");
        // The bindings would keep it, too.
        std::mem::forget(library);
        return match address {
            Some(address) if address == init => Reach::Same,
            Some(address) => Reach::Other {
                file: table::file_of(address).unwrap_or(name),
            },
            None => Reach::Other { file: name },
        };
    }
    Reach::Nothing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_no_driver_is_an_answer_and_not_a_panic() {
        let candidate = Candidate {
            origin: crate::loader::Origin::DynamicLinker,
            path: "libc.so.6".to_owned(),
        };
        let (attempt, decision) = attempt(candidate, &VisibleDevices::All);
        assert!(matches!(attempt.outcome, Outcome::SymbolMissing { .. }), "{attempt:?}");
        let decision = decision.expect("it was opened");
        assert!(matches!(decision, DriverDecision::SymbolMissing { .. }));
    }
}
