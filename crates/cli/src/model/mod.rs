//! `baton model`: fetches, lists and describes models. [`resolve`] defines what `--model` means.

pub mod cache;
pub mod catalogue;
mod error;
pub mod export;
mod hub;
mod hub_error;
pub mod inspect;
mod interrupt;
pub mod list;
pub(crate) mod progress;
mod pull;
mod source;
mod unpack;

use std::io::Write;

use clap::{Args, Subcommand};
use serde_json::json;

pub use error::PullError;
pub use hub_error::HubError;
pub use pull::PullOptions;
pub use source::ResolvedModel;
pub(crate) use source::{FoundModel, find, resolve};

use crate::exit::{Exit, ExitError};
use hub::FetchOptions;
use source::Source;

#[derive(Debug, Args)]
pub struct ModelArgs {
    #[command(subcommand)]
    pub verb: ModelVerb,
}

#[derive(Debug, Subcommand)]
pub enum ModelVerb {
    /// Download a model once and check it.
    Pull(PullArgs),
    /// List the models on this machine, and those that have a short name.
    List(list::ListArgs),
    /// Describe a model: its numbers, its formats, the memory that it needs.
    Inspect(inspect::InspectArgs),
    /// Write a model's tokenizer into a folder that transformers loads.
    ExportTokenizer(export::ExportArgs),
}

#[derive(Debug, Args)]
pub struct PullArgs {
    /// A name from `baton model list`, or a name on the Hugging Face hub: org/name, org/name@REVISION, org/name:FILE.gguf,
    /// org/name:Q4_K_M. Models of the hub are put into the cache that its tools share (HF_HOME).
    #[arg(default_value = "smollm2-135m")]
    pub name: String,
    /// Download again even when the model is cached; for a model of the hub, ask whether there is a newer revision.
    #[arg(long)]
    pub force: bool,
    /// No progress on stderr.
    #[arg(long)]
    pub quiet: bool,
    /// Print one JSON object, name and path, instead of the path.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &ModelArgs) -> anyhow::Result<Exit> {
    match &args.verb {
        ModelVerb::List(args) => list::run(args),
        ModelVerb::Inspect(args) => inspect::run(args),
        ModelVerb::ExportTokenizer(args) => export::run(args),
        ModelVerb::Pull(args) => pull(args),
    }
}

/// Prints the path of the file or folder.
fn pull(args: &PullArgs) -> anyhow::Result<Exit> {
    let PullArgs {
        name,
        force,
        quiet,
        json,
    } = args;
    let options = FetchOptions {
        force: *force,
        quiet: *quiet,
    };
    match Source::of(name).and_then(|source| source.fetch(options)) {
        Ok(model) => {
            let path = model.path.display().to_string();
            let line = match json {
                true => json!({"name": name, "path": path}).to_string(),
                false => path,
            };
            writeln!(crate::stdout::stdout(), "{line}")?;
        }
        Err(error) => return Err(with_exit(error)),
    }
    Ok(Exit::Ok)
}

/// The error with the status that it ends a verb with.
pub(crate) fn with_exit(error: PullError) -> anyhow::Error {
    ExitError::new(error.exit(), error.into()).into()
}
