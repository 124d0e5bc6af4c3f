//! Compiles the protos with protox (pure Rust), so the build needs no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "baton/v1/inference.proto",
        "baton/v1/handoff.proto",
        "baton/v1/membership.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    // KV bytes are decoded without a copy.
    tonic_prost_build::configure()
        .bytes(".baton.v1.KvBlock.data")
        .bytes(".baton.v1.TransportOffer.offer")
        .compile_fds(descriptors)?;
    Ok(())
}
