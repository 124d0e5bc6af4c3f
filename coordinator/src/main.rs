//! The `baton-coordinator` binary: the front of a baton cluster. See `lib.rs`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    service_runtime::process::main(coordinator::PROGRAM, std::env::args_os(), coordinator::run)
}
