//! `baton model inspect`: what is in a model's files, and how much memory it takes.

use std::io::Write;

use clap::{Args, ValueEnum as _};
use engine::Numerics;
use model_files::gguf::hex;
use model_files::info::ModelInfo;
use model_files::model::Model;
use serde::Serialize;

use crate::exit::Exit;
use crate::model::{resolve, with_exit};

const NUMERICS: [Numerics; 2] = [Numerics::Int8Blocks, Numerics::Exact];

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
    let file = Model::open(&resolved.path)?;
    let info = ModelInfo::of(&file)?;
    let sha256 = hex(&file.content_sha256());
    let served = resolved.name.unwrap_or_else(|| file.name());
    let memory = NUMERICS.map(|numerics| Memory::of(&info, numerics));
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut object = serde_json::to_value(&info)?;
        object["sha256"] = sha256.into();
        object["served_name"] = served.into();
        object["memory"] = serde_json::to_value(memory)?;
        writeln!(out, "{object}")?;
    } else {
        write_lines(&mut out, &info, (&served, &sha256))?;
        write_memory(&mut out, &memory)?;
    }
    Ok(Exit::Ok)
}

/// Memory that a node needs for this model, for one kind of numerics.
#[derive(Clone, Copy, Debug, Serialize)]
struct Memory {
    numerics: Numerics,
    /// For each token of a prompt or an answer.
    kv_token_bytes: u64,
    /// For one sequence as long as the model allows.
    kv_context_bytes: u64,
}

impl Memory {
    fn of(info: &ModelInfo, numerics: Numerics) -> Memory {
        let kv_token_bytes = info
            .kv_values_per_token
            .saturating_mul(numerics.kv_dtype().bytes() as u64);
        Memory {
            numerics,
            kv_token_bytes,
            kv_context_bytes: kv_token_bytes.saturating_mul(info.config.context_length as u64),
        }
    }
}

fn write_memory(out: &mut impl Write, memory: &[Memory]) -> std::io::Result<()> {
    for Memory {
        numerics,
        kv_token_bytes,
        kv_context_bytes,
    } in memory
    {
        let numerics = numerics
            .to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned());
        let context = kv_context_bytes.div_ceil(1 << 20);
        let words = format!("{kv_token_bytes} bytes a token, {context} MiB for the whole context ({numerics})");
        writeln!(out, "{:<14} {words}", "KV")?;
    }
    Ok(())
}

fn write_lines(out: &mut impl Write, info: &ModelInfo, (served, sha256): (&str, &str)) -> std::io::Result<()> {
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
