//! Six synthetic results, one for each row of the table, and the step that follows from a contract.

use super::*;
use crate::record::Run;
use crate::test_kit::{later, request, run, slo};

fn summary(run: &Run) -> Summary {
    Summary::of(run, &slo(300.0, 50.0))
}

/// 20 requests, one in each 10 s, with their first token after `ttft_ms` and then one each `tpot_ms`.
fn steady(ttft_ms: u64, tpot_ms: u64) -> Run {
    let tokens: Vec<u64> = (0..10).map(|token| ttft_ms + token * tpot_ms).collect();
    run(
        "steady",
        (0..20)
            .map(|id| later(request(id, &tokens), f64::from(id) * 10_000.0))
            .collect(),
    )
}

fn shown(seen: &Observations) -> Vec<Pattern> {
    let rows = diagnose(seen, &slo(300.0, 50.0));
    assert_eq!(rows.len(), 6);
    rows.into_iter()
        .filter(|row| row.shown == Shown::Shown)
        .map(|row| row.pattern)
        .collect()
}

#[test]
fn nothing_measured_shows_nothing_and_says_what_is_needed() {
    let rows = diagnose(&Observations::default(), &slo(1.0, 1.0));
    assert!(
        rows.iter()
            .all(|row| row.shown == Shown::NotMeasured && !row.evidence.is_empty())
    );
}

#[test]
fn ttft_that_grows_with_the_prompt_is_prefill() {
    let by_prompt = vec![(128.0, 30.0), (1024.0, 200.0), (2048.0, 410.0)];
    assert_eq!(
        shown(&Observations {
            by_prompt,
            ..Observations::default()
        }),
        [Pattern::PrefillBound]
    );
    let by_prompt = vec![(128.0, 100.0), (2048.0, 120.0)];
    assert_eq!(
        shown(&Observations {
            by_prompt,
            ..Observations::default()
        }),
        []
    );
}

#[test]
fn slow_tokens_of_a_lone_request_are_decode() {
    let (slow, fast) = (summary(&steady(100, 60)), summary(&steady(100, 20)));
    assert_eq!(
        shown(&Observations {
            alone: Some(&slow),
            ..Observations::default()
        }),
        [Pattern::DecodeBound]
    );
    assert_eq!(
        shown(&Observations {
            alone: Some(&fast),
            ..Observations::default()
        }),
        []
    );
}

#[test]
fn a_p99_that_rises_beside_a_flat_median_is_a_queue_or_interference() {
    let low = summary(&steady(100, 20));
    let mut spiky = steady(100, 20);
    for token in &mut spiky.records[3].tokens {
        *token += std::time::Duration::from_secs(2);
    }
    let spiky = summary(&spiky);
    assert_eq!(
        shown(&Observations {
            by_load: vec![&low, &spiky],
            ..Observations::default()
        }),
        [Pattern::QueueOrInterference]
    );
    // When the median rises as well, it is no spike.
    let all_slow = summary(&steady(2000, 20));
    assert_eq!(
        shown(&Observations {
            by_load: vec![&low, &all_slow],
            ..Observations::default()
        }),
        []
    );
}

#[test]
fn more_tokens_in_all_and_slower_ones_each_are_batching() {
    let low = summary(&steady(100, 20));
    let mut high = steady(100, 40);
    high.measured /= 2;
    let high = summary(&high);
    assert_eq!(
        shown(&Observations {
            by_load: vec![&low, &high],
            ..Observations::default()
        }),
        [Pattern::Batching]
    );
}

#[test]
fn a_warm_cache_that_saves_nothing_misses() {
    let (cold, warm, works) = (
        summary(&steady(200, 20)),
        summary(&steady(195, 20)),
        summary(&steady(60, 20)),
    );
    assert_eq!(
        shown(&Observations {
            cold_and_warm: Some([&cold, &warm]),
            ..Observations::default()
        }),
        [Pattern::CacheMiss]
    );
    assert_eq!(
        shown(&Observations {
            cold_and_warm: Some([&cold, &works]),
            ..Observations::default()
        }),
        []
    );
    let hits = Summary {
        cached_share: Some(0.74),
        ..warm
    };
    assert_eq!(
        shown(&Observations {
            cold_and_warm: Some([&cold, &hits]),
            ..Observations::default()
        }),
        []
    );
}

#[test]
fn tokens_far_slower_than_memory_allows_are_something_else() {
    let alone = summary(&steady(100, 40));
    let seen = |bytes_per_s: f64| Observations {
        alone: Some(&alone),
        prediction: Prediction::decode(4e9, bytes_per_s),
        ..Observations::default()
    };
    assert_eq!(shown(&seen(400e9)), [Pattern::NotMemoryBound]);
    assert_eq!(shown(&seen(120e9)), []);
}

#[test]
fn the_next_step_follows_what_a_user_notices_first() {
    let clause = |name: &str, is_met: bool| Clause {
        name: name.to_owned(),
        limit: 1.0,
        measured: Some(2.0),
        is_met,
    };
    let step = |ttft: bool, tpot: bool, e2e: bool, unserved: bool| {
        next_step(&[
            clause("ttft_ms_p95_max", ttft),
            clause("tpot_ms_p95_max", tpot),
            clause("e2e_ms_p99_max", e2e),
            clause("unserved_share_max", unserved),
        ])
    };
    assert!(matches!(step(false, false, false, false), NextStep::Serve { .. }));
    let NextStep::Ttft { clause: unmet } = step(false, false, false, true) else {
        panic!("nobody waits for an answer, so TTFT is next");
    };
    assert_eq!((unmet.name.as_str(), unmet.measured), ("ttft_ms_p95_max", Some(2.0)));
    assert!(matches!(step(true, false, false, true), NextStep::Tpot { .. }));
    assert!(matches!(step(true, true, false, true), NextStep::Cost { .. }));
    assert_eq!(step(true, true, true, true), NextStep::Stop);
}
