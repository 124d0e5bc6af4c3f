//! The `baton` binary: parses the command line, runs one verb, turns its outcome into the documented exit status.

use std::process::ExitCode;

use clap::Parser;
use cli::args::Cli;

fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => cli::args::run(cli),
        Err(error) => cli::exit::report_usage(&error),
    }
}
