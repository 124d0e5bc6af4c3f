//! What the coordinator exposes is what the table says, and every way to use it shows.

use service_runtime::metrics::exposition::{differences, read, without_a_start};
use service_runtime::metrics::vllm;
use serving_core::cluster::{HandoffOutcome, NodeHealth};
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{NodeEpoch, NodeId, NodeName};
use serving_core::node::{KvBlockCounts, NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus, PairHealth};
use serving_core::stage::StageTimings;

use super::*;
use crate::api::{COUNTED_REFUSALS, EdgeMetrics};
use crate::cluster_metrics::NodeSnapshot;
use crate::keys::OverLimit;

const ROLE: Role = Role::Coordinator;
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const WITH_ALIASES: MetricsConfig = MetricsConfig { vllm_metrics: true };

fn new_metrics(config: MetricsConfig) -> Metrics {
    Metrics::new("smol", config, &SloConfig::default())
}

fn stages() -> StageTimings {
    let ms = Duration::from_millis;
    let mut stages = StageTimings::default();
    for (stage, took) in [
        (Stage::Tokenize, ms(1)),
        (Stage::Queue, ms(300)),
        (Stage::PrefillQueue, ms(210)),
        (Stage::PrefillForward, ms(400)),
        (Stage::Egress, ms(1)),
        (Stage::EgressRest, ms(2)),
    ] {
        stages.push(stage, took);
    }
    stages
}

fn ended<'a>(outcome: &'a str, stages: &'a StageTimings) -> EndedRequest<'a> {
    EndedRequest {
        model: "smol",
        lane: Lane::Batch,
        outcome,
        finish: Some("length"),
        ttft: Some(Duration::from_millis(120)),
        tpot: Some(Duration::from_millis(25)),
        last_token_to_end: Some(Duration::from_millis(1)),
        e2e: Duration::from_secs(1),
        has_run: true,
        prompt_tokens: 10,
        output_tokens: 20,
        stages,
        trace_id: TRACE,
        stalls: &[StallCause::PrefillChunk],
        slo: Some(("rag", &[Breach::Ttft])),
    }
}

fn node_id(name: &str) -> NodeId {
    NodeId {
        name: NodeName::new(name),
        epoch: NodeEpoch(1),
    }
}

fn a_node() -> NodeSnapshot {
    let record = NodeRecord {
        id: node_id("prefill-0"),
        role: NodeRole::Prefill,
        is_co_located: false,
        address: "h:1".to_owned(),
        kv_address: "h:1".to_owned(),
        compatibility: CompatibilityHash([0; 32]).into(),
        transports: vec!["shm".to_owned()],
        version: "1".to_owned(),
        capacity: NodeCapacity {
            kv_blocks: 64,
            block_tokens: 16,
            max_sequences: 16,
            max_batch_tokens: 512,
            max_model_tokens: 2048,
            block_bytes: 1024,
        },
        model_name: "smol".to_owned(),
        state: NodeState::Ready,
        roles: Vec::new(),
    };
    let status = NodeStatus {
        state: NodeState::Ready,
        permits_granted_total: 4,
        permits_received_total: 0,
        permits_recalled_total: 0,
        permits_received_by: Vec::new(),
        coordinators: 1,
        kv_blocks: KvBlockCounts::default(),
        running_sequences: 1,
        waiting_sequences: 0,
        waiting_tokens: 0,
        prefix_query_tokens_total: 2,
        prefix_hit_tokens_total: 1,
        preemptions_total: 0,
        computed_tokens_total: 0,
        pairs: vec![PairHealth {
            decode_node: node_id("decode-0"),
            unusable_reason: None,
            transport: None,
        }],
    };
    NodeSnapshot {
        record,
        last_status: Some(status),
        health: NodeHealth::Ready,
        is_suspected: false,
        lease_left: Duration::from_secs(5),
        lease_age: Duration::ZERO,
        permits_available: 4,
        prefix_blocks: 3,
    }
}

#[tokio::test]
async fn stages_before_the_first_token_count_where_there_was_one() {
    let (metrics, stages) = (new_metrics(MetricsConfig::default()), stages());
    let refused = EndedRequest {
        ttft: None,
        ..ended("queue_full", &stages)
    };
    metrics.request_ended(&refused);
    assert!(
        !metrics
            .render()
            .contains(r#"baton_stage_seconds_count{stage="queue",phase="ttft"}"#)
    );
    metrics.request_ended(&ended("ok", &stages));
    assert!(
        metrics
            .render()
            .contains(r#"baton_stage_seconds_count{stage="queue",phase="ttft"} 1"#)
    );
}

#[test]
fn only_requests_that_a_node_had_have_tokens_and_a_time_to_their_end() {
    let (metrics, stages) = (new_metrics(MetricsConfig::default()), stages());
    let refused = EndedRequest {
        has_run: false,
        prompt_tokens: 0,
        output_tokens: 0,
        ..ended("invalid_request", &stages)
    };
    for (request, count) in [(refused, 0), (ended("ok", &stages), 1)] {
        metrics.request_ended(&request);
        let text = metrics.render();
        for name in ["baton_prompt_tokens_count", "baton_output_tokens_count"] {
            assert!(text.contains(&format!("{name} {count}\n")), "{name} {count}\n{text}");
        }
        let has_time = text.contains(r#"baton_e2e_seconds_count{lane="batch"} 1"#);
        assert_eq!(has_time, count == 1, "{text}");
    }
}

/// Everything that can be told to it, told.
fn exercised(metrics: &Metrics) -> String {
    metrics.request_ended(&ended("ok", &stages()));
    metrics.token_gap(Lane::Batch, Duration::from_millis(700), TRACE);
    metrics.first_to_second_token(Duration::from_millis(30));
    metrics.handler_panicked();
    metrics.key_refused("tokens_per_minute");
    metrics.publish(|snapshot| {
        snapshot.policy = "least-loaded";
        snapshot.nodes = vec![a_node()];
        snapshot.waiting_batch = 2;
        snapshot.unfinished = 5;
        snapshot.in_cluster.insert(Stage::Decode, 3);
        let handoff = ("shm-direct".to_owned(), HandoffOutcome::Committed);
        snapshot.stats.handoffs.insert(handoff, 7);
        snapshot.stats.shed.insert(Lane::Batch, 1);
    });
    metrics.render()
}

// The gauge of the async runtime needs one.
#[tokio::test]
async fn what_is_exposed_is_what_the_table_says() {
    let plain = exercised(&new_metrics(MetricsConfig::default()));
    assert_eq!(differences(&plain, ROLE, &[table::ALL]), [""; 0]);
    assert!(!plain.contains("vllm:"), "{plain}");
    let both = exercised(&new_metrics(WITH_ALIASES));
    assert_eq!(differences(&both, ROLE, &[table::ALL, vllm::ALL]), [""; 0]);
}

#[test]
fn every_counter_starts_at_zero() {
    let metrics = new_metrics(WITH_ALIASES);
    metrics.publish(|snapshot| snapshot.policy = "least-loaded");
    let text = metrics.render();
    assert_eq!(without_a_start(&text, ROLE, &[table::ALL, vllm::ALL]), [""; 0]);
    let with_a_value = text
        .lines()
        .filter(|line| line.contains("_total") && !line.ends_with(" 0"));
    let with_a_value: Vec<&str> = with_a_value.filter(|line| !line.starts_with('#')).collect();
    assert_eq!(with_a_value, [""; 0]);
}

#[test]
fn a_request_shows_up_under_its_labels() {
    let text = exercised(&new_metrics(WITH_ALIASES));
    for line in [
        r#"baton_requests_total{model="smol",lane="batch",outcome="ok"} 1"#,
        r#"baton_requests_total{model="smol",lane="batch",outcome="queue_full"} 0"#,
        r#"baton_key_refusals_total{reason="tokens_per_minute"} 1"#,
        r#"baton_key_refusals_total{reason="missing_api_key"} 0"#,
        r#"baton_ttft_seconds_bucket{le="0.15",lane="batch"} 1"#,
        r#"baton_stage_seconds_count{stage="egress",phase="ttft"} 1"#,
        r#"baton_stage_seconds_count{stage="egress",phase="rest"} 1"#,
        r#"baton_stage_requests{stage="decode",phase="rest"} 3"#,
        r#"baton_itl_stalls_total{lane="batch",cause="prefill_chunk"} 1"#,
        r#"baton_handoffs_total{transport="shm-direct",outcome="committed"} 7"#,
        r#"baton_shed_total{lane="interactive"} 0"#,
        r#"baton_slo_total{slo="rag",lane="batch"} 1"#,
        r#"baton_slo_good_total{slo="rag",lane="batch"} 0"#,
        r#"baton_slo_breaches_total{slo="rag",lane="batch",breach="ttft"} 1"#,
        r#"vllm:request_success_total{model_name="smol",engine="0",finished_reason="length"} 1"#,
        r#"vllm:num_requests_running{model_name="smol",engine="0"} 3"#,
        r#"vllm:num_requests_waiting{model_name="smol",engine="0"} 2"#,
        r#"vllm:generation_tokens_total{model_name="smol",engine="0"} 20"#,
        // 300 ms in the queue and 210 ms on the node.
        r#"vllm:request_queue_time_seconds_bucket{le="0.5",model_name="smol",engine="0"} 0"#,
        r#"vllm:request_queue_time_seconds_bucket{le="0.8",model_name="smol",engine="0"} 1"#,
        "# EOF",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    for name in ["baton_ttft_seconds_bucket", "baton_itl_seconds_bucket"] {
        let exemplar = format!("trace_id=\"{TRACE}\"");
        let has = |line: &str| line.starts_with(name) && line.contains(&exemplar);
        assert!(text.lines().any(has), "{name} has no exemplar");
    }
}

#[test]
fn vllm_counts_requests_that_ran_and_no_others() {
    let metrics = new_metrics(WITH_ALIASES);
    let all = stages();
    for outcome in ["deadline", "queue_full", "invalid_request", "cancelled"] {
        metrics.request_ended(&ended(outcome, &all));
    }
    metrics.request_ended(&ended("cancelled", &StageTimings::default()));
    metrics.request_ended(&ended("draining", &all));
    metrics.request_ended(&EndedRequest {
        output_tokens: 0,
        ..ended("draining", &all)
    });
    let text = metrics.render();
    for (reason, count) in [("stop", 0), ("length", 0), ("abort", 2), ("error", 1)] {
        let labels = format!(r#"{{model_name="smol",engine="0",finished_reason="{reason}"}} {count}"#);
        assert!(
            text.contains(&format!("vllm:request_success_total{labels}")),
            "{labels}"
        );
    }
}

#[test]
fn a_stage_is_empty_when_its_requests_have_left_it() {
    let metrics = new_metrics(MetricsConfig::default());
    let busy = || {
        let text = metrics.render();
        let lines = text.lines().filter(|line| line.starts_with("baton_stage_requests{"));
        let (mut stages, mut busy) = (0, Vec::new());
        for line in lines {
            stages += 1;
            busy.extend((!line.ends_with(" 0.0")).then(|| line.to_owned()));
        }
        assert_eq!(stages, 9);
        busy
    };
    assert_eq!(busy(), [""; 0]);
    metrics.stage_entered(Stage::Parse);
    metrics.stage_entered(Stage::Parse);
    assert_eq!(busy(), [r#"baton_stage_requests{stage="parse",phase="ttft"} 2.0"#]);
    metrics.stage_left(Stage::Parse);
    metrics.stage_left(Stage::Parse);
    assert_eq!(busy(), [""; 0]);
}

#[test]
fn every_slo_limit_is_an_edge() {
    let is_edge = |metric: &Metric, limit: Duration| {
        let limit = limit.as_secs_f64();
        assert!(metric.edges.contains(&limit), "{} has no edge at {limit}", metric.name);
    };
    let built_in = SloConfig::default();
    assert_eq!(built_in.profiles().len(), 6);
    for profile in built_in.profiles() {
        is_edge(&table::TTFT, profile.ttft_max);
        is_edge(&table::ITL, profile.itl_max);
        is_edge(&table::FIRST_TO_SECOND_TOKEN, profile.itl_max);
    }
}

/// The table is below this crate: what it says of this crate's lists is compared here.
#[test]
fn the_closed_lists_of_the_table_are_those_that_are_counted() {
    let of = |metric: &Metric, label| metric.closed_values(label, ROLE).unwrap_or_default();
    assert_eq!(of(&table::SLO_BREACHES, "breach"), Breach::ALL.map(Breach::name));
    let refusals = [COUNTED_REFUSALS.as_slice(), &OverLimit::NAMES].concat();
    assert_eq!(of(&table::KEY_REFUSALS, "reason"), refusals);
    assert_eq!(of(&table::ITL_STALLS, "cause"), StallCause::ALL.map(StallCause::name));
    let text = new_metrics(MetricsConfig::default()).render();
    let slo = &read(&text)["baton_slo_breaches"];
    assert_eq!(
        slo.series.len(),
        2 * SloConfig::default().profiles().len() * Breach::ALL.len()
    );
}
