//! The real model over HTTP gives the reference's token ids and probabilities, on a split cluster, for both numerics.

use integration_tests::cluster::{TestCluster, baton_executable, options};
use integration_tests::goldens::{self, Measured, Thresholds};
use serde_json::{Value, json};

/// The four rows with longer prompts have 2,570 of the 3,077 prompt tokens. Exact arithmetic is slow, so only `BATON_FULL=1` runs
/// them. Eight-bit numerics run all.
const EXACT_PROMPT_TOKENS_MAX: usize = 100;

async fn compare(thresholds: Thresholds, prompt_tokens_max: usize) {
    let mut options = options("1p1d").expect("binary and model");
    options.settings.numerics = Some(thresholds.numerics.into());
    // Threads change no bit, and beside other tests one alone waits for none.
    options.settings.threads_per_node = Some(1);
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

/// What the README, the help of `baton chat` and the ready line of `baton up` ask. Its best tokens lead clearly, so that no change of a
/// last digit gives a newcomer a wrong answer.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_question_of_a_newcomer_has_a_clear_answer() {
    const QUESTION: &str = "Name the capital of France.";
    let help = std::process::Command::new(baton_executable().expect("baton"))
        .args(["chat", "--help"])
        .output()
        .expect("help");
    assert!(String::from_utf8_lossy(&help.stdout).contains(QUESTION));
    let cluster = TestCluster::start_with(options("1p1d").expect("binary and model"))
        .await
        .expect("cluster");
    let body = json!({
        "model": "smollm2-135m", "temperature": 0, "max_tokens": 32, "logprobs": true, "top_logprobs": 2,
        "messages": [{ "role": "user", "content": QUESTION }],
    });
    let url = format!("{}/v1/chat/completions", cluster.cluster.base_url());
    let answer = reqwest::Client::new()
        .post(url)
        .json(&body)
        .send()
        .await
        .expect("an answer");
    let answer: Value = answer.json().await.expect("JSON");
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str().expect("text");
    assert!(text.contains("Paris"), "{text}");
    for step in choice["logprobs"]["content"].as_array().expect("steps") {
        let [best, second] = [0, 1].map(|place| step["top_logprobs"][place]["logprob"].as_f64().expect("a number"));
        // Twice what the default numerics change at most.
        assert!(best - second > 2.0 * goldens::INT8_BLOCKS.logprob_max, "{step}");
    }
    cluster.stop().await.expect("stop");
}
