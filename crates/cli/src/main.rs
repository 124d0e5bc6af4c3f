//! The `baton` binary: parses the command line, runs one verb, turns its outcome into the documented exit status.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::args::main()
}
