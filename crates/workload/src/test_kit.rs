//! Requests and runs for the unit tests of this crate.

use std::collections::BTreeMap;
use std::time::Duration;

use serving_core::request::Lane;

use crate::comparison::Slo;
use crate::record::{LoopKind, Outcome, RequestRecord, Run, RunPart, Usage};

/// A completed request that was due at 0, with a token at each of these milliseconds.
pub(crate) fn request(id: u32, tokens_ms: &[u64]) -> RequestRecord {
    let tokens: Vec<Duration> = tokens_ms.iter().map(|at| Duration::from_millis(*at)).collect();
    RequestRecord {
        id: format!("r-{id}"),
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
        output_hash: None,
        server: None,
    }
}

/// The same request, with everything later by `ms`.
pub(crate) fn later(mut record: RequestRecord, ms: f64) -> RequestRecord {
    let by = Duration::from_secs_f64(ms / 1e3);
    for time in [&mut record.scheduled, &mut record.sent, &mut record.ended] {
        *time += by;
    }
    for token in &mut record.tokens {
        *token += by;
    }
    record
}

/// An open-loop run of these requests.
pub(crate) fn run(name: &str, records: Vec<RequestRecord>) -> Run {
    let measured = || records.iter().filter(|record| record.is_measured());
    let first = measured().map(|record| record.scheduled).min().unwrap_or_default();
    let last = measured().map(|record| record.ended).max().unwrap_or_default();
    Run {
        name: name.to_owned(),
        loop_kind: LoopKind::Open,
        offered: 1.0,
        measured: last.saturating_sub(first),
        records,
        client: Usage::default(),
        server: BTreeMap::new(),
        environment: BTreeMap::new(),
    }
}

pub(crate) fn slo(ttft_ms_max: f64, itl_ms_max: f64) -> Slo {
    Slo {
        name: "custom".to_owned(),
        ttft_ms_max,
        itl_ms_max,
    }
}
