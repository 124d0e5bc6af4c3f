//! Writes `proto/generated/baton.v1.rs` from the files in `proto/baton/v1`. Run it after a change to one of them:
//! `cargo run --manifest-path tools/generate-wire/Cargo.toml`. A test of `proto` fails until then.

#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::path::Path;

use sha2::{Digest as _, Sha256};

/// The test that compares has the same list (`proto/src/generated_tests.rs`).
const PROTOS: [&str; 3] = [
    "baton/v1/inference.proto",
    "baton/v1/handoff.proto",
    "baton/v1/membership.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    let out = tempdir()?;
    tonic_prost_build::configure()
        // KV bytes are decoded without a copy.
        .bytes(".baton.v1.KvBlock.data")
        .bytes(".baton.v1.TransportOffer.offer")
        .out_dir(&out)
        .compile_fds(protox::compile(PROTOS, [&proto])?)?;
    let code = fs::read_to_string(out.join("baton.v1.rs"))?;
    let mut source = Sha256::new();
    for file in PROTOS {
        source.update(fs::read(proto.join(file))?);
    }
    let (source, digest) = (hex(&source.finalize()), hex(&Sha256::digest(&code)));
    let head = format!("// Written by tools/generate-wire: do not edit.\n// protos {source}\n// code {digest}\n");
    fs::write(proto.join("generated/baton.v1.rs"), head + &code)?;
    fs::remove_dir_all(out)?;
    Ok(())
}

fn tempdir() -> std::io::Result<std::path::PathBuf> {
    let folder = std::env::temp_dir().join(format!("generate-wire-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
