//! The hidden verbs that are the processes themselves. `baton up` starts this binary again with them.

mod node;
mod packing;
mod settings;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;
use service_runtime::process;

use settings::NodeSettings;

/// The process's own command line, unchanged. Its config struct parses it, as in the process's own binary.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

impl ServeArgs {
    fn behind(self, program: &str) -> impl Iterator<Item = OsString> {
        std::iter::once(OsString::from(program)).chain(self.arguments)
    }
}

pub fn coordinator(args: ServeArgs) -> ExitCode {
    let program = coordinator::PROGRAM;
    process::main(program, args.behind(program.name), coordinator::run)
}

pub fn prefill_node(args: ServeArgs) -> ExitCode {
    let program = prefill_node::PROGRAM;
    process::main(program, args.behind(program.name), |config, shutdown| {
        node::run(NodeSettings::of_prefill(config), shutdown)
    })
}

pub fn decode_node(args: ServeArgs) -> ExitCode {
    let program = decode_node::PROGRAM;
    process::main(program, args.behind(program.name), |config, shutdown| {
        node::run(NodeSettings::of_decode(config), shutdown)
    })
}
