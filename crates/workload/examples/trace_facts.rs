//! Prints what a trace is like, as JSON: `cargo run --release -p workload --example trace_facts -- FILE`.

#![forbid(unsafe_code)]

use std::fs::File;
use std::path::PathBuf;

use workload::trace::facts::TraceFacts;
use workload::trace::{ReadLimits, read};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path: PathBuf = std::env::args_os()
        .nth(1)
        .ok_or("the path of a trace is missing")?
        .into();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let trace = read(&name, &mut File::open(&path)?, &ReadLimits::default())?;
    println!("{}", serde_json::to_string_pretty(&TraceFacts::of(&trace))?);
    Ok(())
}
