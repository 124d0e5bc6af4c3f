//! Writes the tiny models of the golden outputs.
//!
//! `cargo run --release -p engine --example tiny_models -- FOLDER` writes `GOLDEN-FILE.MODEL.gguf` for each of them.

#![forbid(unsafe_code)]

use std::path::Path;

use anyhow::{Context, Result};
use model_files::test_kit::golden_models;

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).context("first argument: a folder")?;
    for model in golden_models() {
        let name = format!("{}.{}.gguf", model.file, model.name);
        model.builder.write(&Path::new(&folder).join(name))?;
    }
    Ok(())
}
