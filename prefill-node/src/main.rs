//! The process `baton-prefill-node`: configuration, then `prefill_node::run`, then the exit code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    service_runtime::process::main(prefill_node::PROGRAM, std::env::args_os(), prefill_node::run)
}
