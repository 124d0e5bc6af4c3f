//! Records and runs for the tests of this folder.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;
use serving_core::request::Lane;
use workload::comparison::{Arm, ArmKind, ArmRun, Comparison, Fairness, Resources, Shape, Slo, TuningPoint};
use workload::record::{LoopKind, Outcome, RequestRecord, Run, RunPart, ServerRecord, Usage};

/// A measured, completed request that was due at 0; its tokens came at these milliseconds.
pub(crate) fn record(index: usize, tokens_ms: &[f64]) -> RequestRecord {
    let at = |ms: &f64| Duration::from_secs_f64(ms / 1e3);
    let tokens: Vec<Duration> = tokens_ms.iter().map(at).collect();
    RequestRecord {
        id: format!("run-{index}"),
        part: RunPart::Measured,
        lane: Lane::Interactive,
        prompt_tokens: 100,
        cached_tokens: None,
        output_tokens: tokens.len() as u32,
        scheduled: Duration::ZERO,
        sent: Duration::ZERO,
        ended: tokens.last().copied().unwrap_or_default(),
        tokens,
        outcome: Outcome::Completed,
        output_hash: Some(index as u64),
        server: Some(ServerRecord {
            prefill_node: Some("prefill-0".to_owned()),
            decode_node: Some("decode-0".to_owned()),
            kv_bytes: Some(1000),
            kv_transfer_ms: Some(1.0),
            ..ServerRecord::default()
        }),
    }
}

/// Ten seconds.
pub(crate) fn run(name: &str, records: Vec<RequestRecord>) -> Run {
    Run {
        name: name.to_owned(),
        loop_kind: LoopKind::Open,
        offered: 1.0,
        records,
        measured: Duration::from_secs(10),
        client: Usage::default(),
        server: BTreeMap::from([(
            "decode-0".to_owned(),
            Usage {
                cpu: Duration::from_secs(5),
                memory_bytes_max: 0,
            },
        )]),
        environment: BTreeMap::new(),
    }
}

fn arm(name: &str, kind: ArmKind) -> Arm {
    let point = |is_chosen| TuningPoint {
        settings: [("max_num_seqs".to_owned(), json!(8))].into(),
        goodput: 1.0,
        ttft_ms_p99: 5.0,
        itl_ms_p99: 1.0,
        is_chosen,
    };
    let tuning = match kind {
        ArmKind::CoLocated => Vec::new(),
        _ => vec![point(true), point(false)],
    };
    Arm {
        name: name.to_owned(),
        kind,
        topology: "1p1d".to_owned(),
        settings: [("cores".to_owned(), json!({"decode-0": 1}))].into(),
        resources: Resources {
            cores: 2,
            is_measured: true,
            ..Resources::default()
        },
        tuning,
    }
}

/// Three repeats of two arms in which everything is as it should be.
pub(crate) fn comparison() -> Comparison {
    let run = |arm: &str, repeat| ArmRun {
        arm: arm.to_owned(),
        repeat,
        run: self::run(arm, (0..3).map(|index| record(index, &[5.0, 6.0])).collect()),
    };
    let order = [
        ("whole", 0),
        ("split", 0),
        ("split", 1),
        ("whole", 1),
        ("whole", 2),
        ("split", 2),
    ];
    let runs = Vec::from(order.map(|(arm, repeat)| run(arm, repeat)));
    Comparison {
        date: "2026-11-25".to_owned(),
        command: "baton compare".to_owned(),
        hypothesis: None,
        slo: Slo {
            name: "custom".to_owned(),
            ttft_ms_max: 100.0,
            itl_ms_max: 50.0,
        },
        arms: vec![arm("whole", ArmKind::CoLocated), arm("split", ArmKind::Disaggregated)],
        shapes: vec![Shape {
            name: "short".to_owned(),
            traffic: "short".to_owned(),
            trace_hash: "abc".to_owned(),
            runs,
            contrasts: Vec::new(),
            verdict: String::new(),
        }],
        fairness: Fairness::default(),
        environment: BTreeMap::new(),
    }
}
