//! `baton model inspect`: what is in a model's files, and how much memory it takes.

use std::io::Write;

use anyhow::Context as _;
use clap::Args;
use engine::Numerics;
use model_files::gguf::hex;
use model_files::info::ModelInfo;
use model_files::model::Model;

use crate::exit::Exit;
use crate::model::{resolve, with_exit};

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// What `baton up --model` takes: the path of a GGUF file or of a Hugging Face folder, or a name. A model with a name is
    /// fetched when it is not on this machine.
    #[arg(default_value = "smollm2-135m")]
    pub model: String,
    /// One JSON object instead of lines.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &InspectArgs) -> anyhow::Result<Exit> {
    let resolved = resolve(&args.model).map_err(with_exit)?;
    let opened = Model::open(&resolved.path);
    let file = opened.with_context(|| format!("{} cannot be used", resolved.path.display()))?;
    let info = ModelInfo::of(&file)?;
    let sha256 = hex(&file.content_sha256());
    let served = resolved.name.unwrap_or_else(|| file.name());
    let memory = Memory::of(&file);
    let mut out = crate::stdout::stdout();
    if args.json {
        let mut object = serde_json::to_value(&info)?;
        object["sha256"] = sha256.into();
        object["served_name"] = served.into();
        object["memory"] = serde_json::to_value(&memory)?;
        writeln!(out, "{object}")?;
    } else {
        write_lines(&mut out, &info, (&served, &sha256, &memory))?;
    }
    Ok(Exit::Ok)
}

/// What the model takes of a machine's memory. Weights are `null` in numerics that do not run this model.
#[derive(Debug, serde::Serialize)]
struct Memory {
    weights_bytes_int8_blocks: Option<u64>,
    weights_bytes_exact: Option<u64>,
    kv_bytes_per_token_int8_blocks: u64,
    kv_bytes_per_token_exact: u64,
}

impl Memory {
    fn of(file: &Model) -> Self {
        let config = file.config();
        let values = (2 * config.layer_count * config.kv_size()) as u64;
        let kv = |numerics: Numerics| values * numerics.kv_dtype().bytes() as u64;
        Self {
            weights_bytes_int8_blocks: engine::weights_bytes(file, Numerics::Int8Blocks).ok(),
            weights_bytes_exact: engine::weights_bytes(file, Numerics::Exact).ok(),
            kv_bytes_per_token_int8_blocks: kv(Numerics::Int8Blocks),
            kv_bytes_per_token_exact: kv(Numerics::Exact),
        }
    }

    fn text(&self) -> String {
        let [int8, exact] = [
            (self.weights_bytes_int8_blocks, self.kv_bytes_per_token_int8_blocks),
            (self.weights_bytes_exact, self.kv_bytes_per_token_exact),
        ]
        .map(|(weights, kv)| match weights {
            Some(weights) => format!(
                "{:.1} MB of weights and {kv} bytes of KV for each token",
                weights as f64 / 1e6
            ),
            None => "not supported".to_owned(),
        });
        format!("int8-blocks: {int8}; exact: {exact}")
    }
}

fn write_lines(out: &mut impl Write, info: &ModelInfo, extra: (&str, &str, &Memory)) -> std::io::Result<()> {
    let (served, sha256, memory) = extra;
    let config = &info.config;
    let end: Vec<String> = info.end_tokens.iter().map(ToString::to_string).collect();
    let lines = [
        ("file", info.path.display().to_string()),
        ("size", format!("{} bytes, {}", info.file_bytes, info.form)),
        ("sha256", sha256.to_owned()),
        ("served as", served.to_owned()),
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
        ("memory", memory.text()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_model_is_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("mine.gguf");
        std::fs::write(&path, b"this is not a model").expect("written");
        let args = InspectArgs {
            model: path.display().to_string(),
            json: false,
        };
        let error = run(&args).expect_err("no model");
        assert!(error.to_string().contains("mine.gguf"), "{error:#}");
    }
}
