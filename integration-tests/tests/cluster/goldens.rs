//! The real model over HTTP gives the reference's token ids and probabilities, on a split cluster, for both numerics.

use integration_tests::cluster::{TestCluster, options};
use integration_tests::goldens::{self, Measured, Thresholds};

/// The four rows with longer prompts have 2,570 of the 3,077 prompt tokens. Exact arithmetic is slow, so only `BATON_FULL=1` runs
/// them. Eight-bit numerics run all.
const EXACT_PROMPT_TOKENS_MAX: usize = 100;

async fn compare(thresholds: Thresholds, prompt_tokens_max: usize) {
    let mut options = options("1p1d").expect("binary and model");
    options.settings.numerics = Some(thresholds.numerics.into());
    let cluster = TestCluster::start_with(options).await.expect("cluster");
    let client = reqwest::Client::new();
    let mut measured = Measured::default();
    let rows = goldens::load().expect("goldens");
    for row in rows
        .into_iter()
        .filter(|row| row.prompt_token_ids.len() <= prompt_tokens_max)
    {
        let ids = goldens::tokenize(&client, cluster.cluster.base_url(), &row)
            .await
            .expect("tokenize");
        assert_eq!(ids, row.prompt_token_ids, "prompt ids of {}", row.id);
        goldens::teacher_force(&client, cluster.cluster.base_url(), &row, &mut measured)
            .await
            .expect("teacher forcing");
        goldens::run_free(
            &client,
            cluster.cluster.base_url(),
            &row,
            thresholds.margin,
            &mut measured,
        )
        .await
        .expect("free run");
    }
    measured
        .check(&thresholds)
        .expect("inside the thresholds of data/golden/README.md");
    cluster.stop().await.expect("stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_bit_numerics_stay_within_their_thresholds() {
    compare(goldens::INT8_BLOCKS, usize::MAX).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exact_numerics_stay_within_their_thresholds() {
    let all = std::env::var_os("BATON_FULL").is_some();
    let tokens_max = if all { usize::MAX } else { EXACT_PROMPT_TOKENS_MAX };
    compare(goldens::EXACT, tokens_max).await;
}
