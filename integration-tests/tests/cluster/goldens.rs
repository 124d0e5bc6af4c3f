//! The real model over HTTP gives the reference's token ids and probabilities, on a split cluster, for both numerics.

use integration_tests::cluster::{TestCluster, options};
use integration_tests::goldens::{self, Measured, Thresholds};

async fn compare(thresholds: Thresholds) {
    let mut options = options("1p1d").expect("binary and model");
    options.settings.numerics = Some(thresholds.numerics.into());
    let cluster = TestCluster::start_with(options).await.expect("cluster");
    let client = reqwest::Client::new();
    let mut measured = Measured::default();
    for row in goldens::load().expect("goldens") {
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
    compare(goldens::INT8_BLOCKS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exact_numerics_stay_within_their_thresholds() {
    compare(goldens::EXACT).await;
}
