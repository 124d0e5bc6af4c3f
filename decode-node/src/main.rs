//! `baton-decode-node`: the process. Everything is in the library; `baton serve-decode` runs the same.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    service_runtime::process::main(decode_node::PROGRAM, std::env::args_os(), decode_node::run)
}
