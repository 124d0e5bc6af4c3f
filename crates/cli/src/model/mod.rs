//! `baton model`: fetches, lists and describes model files. [`resolve`] defines what `--model` means.

pub mod cache;
pub mod catalogue;
mod error;
pub mod inspect;
mod interrupt;
pub mod list;
pub(crate) mod progress;
mod pull;
mod unpack;

use std::io::Write;

use clap::{Args, Subcommand};

pub use error::PullError;
pub use pull::PullOptions;
pub(crate) use pull::{pull, resolve};

use crate::exit::{Exit, ExitError};

#[derive(Debug, Args)]
pub struct ModelArgs {
    #[command(subcommand)]
    pub verb: ModelVerb,
}

#[derive(Debug, Subcommand)]
pub enum ModelVerb {
    /// Download a model once and check it.
    Pull(PullArgs),
    /// List the known models and which are cached.
    List(list::ListArgs),
    /// Describe a model file.
    Inspect(inspect::InspectArgs),
}

#[derive(Debug, Args)]
pub struct PullArgs {
    /// A name from `baton model list`.
    #[arg(default_value = "smollm2-135m")]
    pub name: String,
    /// Download again even when the model is cached.
    #[arg(long)]
    pub force: bool,
    /// No progress on stderr.
    #[arg(long)]
    pub quiet: bool,
}

pub fn run(args: &ModelArgs) -> anyhow::Result<Exit> {
    match &args.verb {
        ModelVerb::List(args) => list::run(args),
        ModelVerb::Inspect(args) => inspect::run(args),
        ModelVerb::Pull(args) => {
            let options = PullOptions {
                quiet: args.quiet,
                force: args.force,
                ..PullOptions::from_env()?
            };
            match pull(&args.name, &options) {
                Ok(path) => writeln!(std::io::stdout(), "{}", path.display())?,
                Err(error) => return Err(ExitError::new(error.exit(), error.into()).into()),
            }
            Ok(Exit::Ok)
        }
    }
}
