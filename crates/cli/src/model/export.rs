//! `baton model export-tokenizer`: the model's tokenizer as a folder that transformers and the clients of benchmarks load.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use model_files::chat_template::ChatTemplateError;
use model_files::model::Model;
use serde_json::json;

use crate::exit::Exit;
use crate::model::{resolve, with_exit};

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// What `baton up --model` takes: the path of a GGUF file or of a Hugging Face folder, or a name.
    pub model: String,
    /// Where tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja go. It is made if it is
    /// missing; files of these names in it are replaced.
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// Print one JSON object, the folder, instead of its path.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &ExportArgs) -> anyhow::Result<Exit> {
    let resolved = resolve(&args.model).map_err(with_exit)?;
    let opened = Model::open(&resolved.path);
    let model = opened.with_context(|| format!("{} cannot be used", resolved.path.display()))?;
    let tokenizer = model.tokenizer()?;
    let template = match model.chat_template() {
        Ok(template) => Some(template),
        // A base model.
        Err(ChatTemplateError::Missing) => None,
        Err(error) => return Err(error.into()),
    };
    let source = template.as_ref().map(|template| template.source());
    tokenizer.write_folder(&args.folder, source)?;
    let folder = args.folder.display().to_string();
    let line = match args.json {
        true => json!({"folder": folder}).to_string(),
        false => folder,
    };
    writeln!(crate::stdout::stdout(), "{line}")?;
    Ok(Exit::Ok)
}
