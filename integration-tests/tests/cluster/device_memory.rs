//! KV that the host cannot address: a pair of device engines, and pairs of a device and a host, give the tokens and the KV of one
//! host engine, over each transport.

use integration_tests::cluster::{TestCluster, options};
use integration_tests::token_exact::{self, Answer, Baseline, Case, Prompts};

const PROMPTS: Prompts = Prompts {
    count: 12,
    tokens_max: 1_100,
};
const ON_HOST: &str = "stand-in";
const ON_DEVICE: &str = "device-stand-in";

/// Engines of the two roles, and the only transport of both.
const PAIRS: [(&str, &str, &str); 4] = [
    (ON_DEVICE, ON_DEVICE, "grpc"),
    (ON_DEVICE, ON_DEVICE, "shm"),
    (ON_HOST, ON_DEVICE, "shm"),
    (ON_DEVICE, ON_HOST, "shm"),
];

/// Answers of a cluster whose nodes have these flags.
async fn answers(topology: &str, flags: &[(&str, [String; 2])], cases: &[Case]) -> Vec<Answer> {
    let mut options = options(topology).expect("options");
    for (name, flags) in flags {
        let flags = flags.iter().map(Into::into).collect();
        options.flags_by_name.insert((*name).to_owned(), flags);
    }
    let cluster = TestCluster::start_with(options).await.expect("a cluster");
    let answers = token_exact::run(&cluster.url(""), cases).await.expect("every answer");
    cluster.stop().await.expect("a clean stop");
    answers
}

fn flags(engine: &str, transport: &str) -> [String; 2] {
    [format!("--engine={engine}"), format!("--transports={transport}")]
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_of_a_device_is_handed_over_like_that_of_a_host() {
    let text: Vec<u32> = (0..4_000).map(|i| i * 37 % 49_000).collect();
    let cases = token_exact::cases(&text, PROMPTS, 11);
    let one_host = answers("1c", &[("decode-0", flags(ON_HOST, "grpc"))], &cases).await;
    for (prefill, decode, transport) in PAIRS {
        let nodes = [
            ("prefill-0", flags(prefill, transport)),
            ("decode-0", flags(decode, transport)),
        ];
        let split = answers("1p1d", &nodes, &cases).await;
        let baseline = Baseline {
            tokens: &one_host,
            kv_hashes: &one_host,
            block_tokens: 16,
        };
        let differences = token_exact::compare(&cases, baseline, &split);
        assert!(
            differences.is_exact(),
            "{prefill} to {decode} over {transport}: {differences:?}"
        );
    }
}
