//! The generated code is that of the files in `proto/baton/v1`, and nobody has edited it.

use sha2::{Digest as _, Sha256};

const GENERATED: &str = include_str!("../generated/baton.v1.rs");
/// The order in which `tools/generate-wire` reads them.
const PROTOS: [&str; 3] = [
    include_str!("../baton/v1/inference.proto"),
    include_str!("../baton/v1/handoff.proto"),
    include_str!("../baton/v1/membership.proto"),
];

fn digest(text: &str) -> String {
    let bytes = Sha256::digest(text);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_generated_code_is_that_of_the_protos() {
    const ADVICE: &str = "run `cargo run --manifest-path tools/generate-wire/Cargo.toml`";
    let mut parts = GENERATED.splitn(4, '\n');
    let mut next = || parts.next().expect("three lines and the code");
    let (_, protos, code, rest) = (next(), next(), next(), next());
    assert_eq!(
        protos,
        format!("// protos {}", digest(&PROTOS.concat())),
        "a proto changed: {ADVICE}"
    );
    assert_eq!(
        code,
        format!("// code {}", digest(rest)),
        "the generated code was edited: {ADVICE}"
    );
}
