//! Split, co-located, chunked, cached, threaded: the same requests give the same token ids and the same KV bytes.
//!
//! A small number of prompts over the whole pairwise cover; `cargo run --release -p integration-tests --example
//! token_exact -- 200` runs the full number (figures in docs/measurements/token-exact.md).

use integration_tests::configurations::PAIRWISE;
use integration_tests::token_exact::Prompts;
use integration_tests::token_exact::report::{self, HEADER, Row};

/// The longest is one of several chunks of each configuration, and of many blocks. The full run goes to 2,000 tokens, which
/// took more than a minute of each run of all tests.
const PROMPTS: Prompts = Prompts {
    count: 4,
    tokens_max: 560,
};

#[tokio::test(flavor = "multi_thread")]
async fn every_configuration_gives_the_tokens_and_the_kv_of_one_node() {
    let rows = report::run(&PAIRWISE, PROMPTS).await.expect("the comparison ran");
    let bad: Vec<String> = rows.iter().filter(|row| !row.is_good()).map(Row::to_string).collect();
    assert!(
        bad.is_empty(),
        "rows that differ or went another way than their topology promises:\n{HEADER}\n{}",
        bad.join("\n")
    );
}
