//! Writes the tiny models of an architecture's golden outputs.
//!
//! `cargo run --release -p engine --example tiny_models -- ARCHITECTURE FOLDER` writes `tied.gguf` and `untied.gguf`.

use std::path::Path;

use anyhow::{Context, Result};
use model_files::arch::Architecture;
use model_files::test_kit::TinyModel;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().context("first argument: the architecture")?;
    let architecture = Architecture::named(&name).with_context(|| format!("known are: {}", Architecture::names()))?;
    let folder = arguments.next().context("second argument: a folder")?;
    for (file, tied) in [("tied.gguf", true), ("untied.gguf", false)] {
        let model = TinyModel::of_golden(architecture, tied);
        model.build().write(&Path::new(&folder).join(file))?;
    }
    Ok(())
}
