//! Records and runs for the tests of this folder.

use std::collections::BTreeMap;
use std::time::Duration;

use serving_core::request::Lane;
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
