//! Every family of models and every number type: two pools give the tokens and the KV of one node.

use std::path::Path;

use cli::local_cluster::LocalClusterOptions;
use futures::StreamExt;
use integration_tests::MODEL;
use integration_tests::cluster::{TestCluster, baton_executable};
use integration_tests::token_exact::{Answer, Baseline, Case, compare, run};
use model_files::test_kit::golden_models;

/// The size that `baton up` gives its nodes' blocks.
const BLOCK_TOKENS: usize = 16;
/// One shorter than a block, one longer than the models' windows, one of several chunks. The context is 256.
const PROMPT_TOKENS: [u32; 3] = [5, 60, 170];
const CHUNK_TOKENS: u32 = 48;
/// Models that are compared at the same time.
const CLUSTERS: usize = 5;

/// Greedy and sampled requests of each length.
fn cases() -> Vec<Case> {
    let case = |length: u32, temperature| Case {
        prompt: (0..length)
            .map(|index| (7 * index * index + 31 * index + length) % 259)
            .collect(),
        output_tokens: 64,
        temperature,
        top_p: 1.0,
        seed: u64::from(length),
        is_constrained: temperature > 0.0,
    };
    let of_length = |length| [case(length, 0.0), case(length, 0.8)];
    PROMPT_TOKENS.into_iter().flat_map(of_length).collect()
}

/// The answers, and how many prompts came by a handoff.
async fn answers(topology: &str, model: &Path, cases: &[Case]) -> (Vec<Answer>, f64) {
    let executable = baton_executable().expect("baton");
    let mut options = LocalClusterOptions::new(executable, topology.parse().expect("a topology"), model.into());
    options.settings.kv_cache_memory = Some("16MiB".to_owned());
    options.settings.threads_per_node = Some(1);
    options.settings.max_num_batched_tokens = Some(CHUNK_TOKENS);
    options.settings.served_model_name = vec![MODEL.to_owned()];
    let cluster = TestCluster::start_with(options).await.expect("it starts");
    let answers = run(cluster.cluster.base_url(), cases).await.expect("answers");
    let metrics = cluster.metrics().await.expect("metrics");
    let handoffs = metrics.sum("baton_handoffs_total", &[("outcome", "committed")]);
    cluster.stop().await.expect("stop");
    (answers, handoffs.unwrap_or(0.0))
}

#[tokio::test(flavor = "multi_thread")]
async fn two_pools_give_the_tokens_and_the_kv_of_one_node_for_every_family_and_number_type() {
    // A cluster mostly waits for its processes to start and to end.
    let models = futures::stream::iter(golden_models());
    let compared = models.for_each_concurrent(CLUSTERS, |golden| async move {
        let (folder, cases) = (tempfile::tempdir().expect("a folder"), cases());
        let name = format!("{} {}", golden.file, golden.name);
        let path = folder.path().join("tiny.gguf");
        golden.builder.write(&path).expect("room for a tiny model");
        let (one_node, none) = answers("1c", &path, &cases).await;
        let (two_pools, handoffs) = answers("1p1d", &path, &cases).await;
        assert_eq!((none, handoffs), (0.0, cases.len() as f64), "{name}: handoffs");
        let baseline = Baseline {
            tokens: &one_node,
            kv_hashes: &one_node,
            block_tokens: BLOCK_TOKENS,
        };
        let differences = compare(&cases, baseline, &two_pools);
        assert!(differences.is_exact(), "{name}: {differences:?}");
        assert_eq!(differences.tokens_compared, cases.len() * 64, "{name}");
        // A model whose answers are all alike would compare nothing.
        let first = &one_node[0].tokens;
        assert!(
            one_node.iter().any(|answer| answer.tokens != *first),
            "{name}: one answer to all"
        );
    });
    compared.await;
}
