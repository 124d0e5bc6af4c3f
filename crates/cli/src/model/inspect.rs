//! `baton model inspect`: what is in a model file.

use std::io::Write;

use clap::Args;
use model_files::gguf::hex;
use model_files::info::ModelInfo;
use model_files::model::Model;

use crate::exit::Exit;
use crate::model::pull::resolve;

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A name from `baton model list`, fetched when it is not cached, or the path of a GGUF file.
    #[arg(default_value = "smollm2-135m")]
    pub model: String,
    /// One JSON object instead of lines.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &InspectArgs) -> anyhow::Result<Exit> {
    let path = resolve(&args.model)?;
    let file = Model::open(&path)?;
    let info = ModelInfo::of(&file)?;
    let sha256 = hex(&file.content_sha256());
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut object = serde_json::to_value(&info)?;
        object["sha256"] = sha256.into();
        writeln!(out, "{object}")?;
    } else {
        write_lines(&mut out, &info, &sha256)?;
    }
    Ok(Exit::Ok)
}

fn write_lines(out: &mut impl Write, info: &ModelInfo, sha256: &str) -> std::io::Result<()> {
    let config = &info.config;
    let end: Vec<String> = info.end_tokens.iter().map(ToString::to_string).collect();
    let lines = [
        ("file", info.path.display().to_string()),
        ("size", format!("{} bytes, {}", info.file_bytes, info.form)),
        ("sha256", sha256.to_owned()),
        ("name", info.name.clone().unwrap_or_else(|| "(none)".to_owned())),
        (
            "license",
            info.license.clone().unwrap_or_else(|| "(not stated)".to_owned()),
        ),
        ("architecture", info.architecture.clone()),
        ("parameters", info.parameter_count.to_string()),
        ("weights", info.quantization_summary()),
        ("layers", config.layer_count.to_string()),
        ("hidden size", config.hidden_size.to_string()),
        (
            "heads",
            format!(
                "{} of {}, {} for keys and values",
                config.head_count, config.head_dim, config.kv_head_count
            ),
        ),
        ("feed-forward", config.ffn_size.to_string()),
        (
            "vocabulary",
            format!(
                "{} tokens, {}",
                config.vocab_size,
                info.tokenizer.as_deref().unwrap_or("no tokenizer")
            ),
        ),
        ("context", format!("{} tokens", config.context_length)),
        ("end tokens", end.join(", ")),
        (
            "chat template",
            if info.has_chat_template { "yes" } else { "no" }.to_owned(),
        ),
    ];
    for (name, value) in lines {
        writeln!(out, "{name:<14} {value}")?;
    }
    Ok(())
}
