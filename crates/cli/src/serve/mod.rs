//! The hidden verbs that are the processes themselves. `baton up` starts this binary again with them.

mod node;
mod packing;
mod settings;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use service_runtime::process;

use crate::model::{PullError, ResolvedModel, resolve};
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
    process::main(
        program,
        args.behind(program.name),
        |mut config: coordinator::Config, shutdown| async move {
            find_model(&mut config.model, &mut config.served_model_name).await?;
            coordinator::run(config, shutdown).await
        },
    )
}

pub fn prefill_node(args: ServeArgs) -> ExitCode {
    let program = prefill_node::PROGRAM;
    process::main(
        program,
        args.behind(program.name),
        |mut config: prefill_node::Config, shutdown| async move {
            find_nodes_model(&mut config.node).await?;
            node::run(NodeSettings::of_prefill(config), shutdown).await
        },
    )
}

pub fn decode_node(args: ServeArgs) -> ExitCode {
    let program = decode_node::PROGRAM;
    process::main(
        program,
        args.behind(program.name),
        |mut config: decode_node::Config, shutdown| async move {
            find_nodes_model(&mut config.node).await?;
            node::run(NodeSettings::of_decode(config), shutdown).await
        },
    )
}

async fn find_nodes_model(config: &mut ::node::NodeConfig) -> Result<(), PullError> {
    match &mut config.model {
        Some(model) => find_model(model, &mut config.served_model_name).await,
        None => Ok(()),
    }
}

/// `model` may be a name. It becomes a path, and a model of the catalogue keeps its name there.
async fn find_model(model: &mut PathBuf, served: &mut Vec<String>) -> Result<(), PullError> {
    // A path that is not text is no name.
    let Some(asked) = model.to_str().map(str::to_owned) else {
        return Ok(());
    };
    let found = tokio::task::spawn_blocking(move || resolve(&asked)).await;
    let ResolvedModel { path, name } = found.unwrap_or_else(|broken| std::panic::resume_unwind(broken.into_panic()))?;
    *model = path;
    if served.is_empty() {
        served.extend(name);
    }
    Ok(())
}
