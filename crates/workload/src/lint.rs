//! Warnings about a measurement: habits that make figures mislead.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::record::{LoopKind, Run};
use crate::saturation::OverSaturation;
use crate::summary::Lag;

/// A p99 of fewer samples is decided by one of them.
const P99_SAMPLES_MIN: usize = 100;
/// A run in which more and fewer requests than these shares hit the cache mixes both.
const MIXED_SHARES: (f64, f64) = (0.1, 0.9);

/// What a reader of the figures should know.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "warning")]
pub enum Warning {
    #[error(
        "only an over-saturated run was measured: its latencies are those of its queue. Measure lower rates as well (baton bench sweep)"
    )]
    OnlySaturated,
    #[error(
        "{run} has {samples} completed requests: its p99 rests on the slowest one. Have at least {P99_SAMPLES_MIN}"
    )]
    FewSamples { run: String, samples: usize },
    #[error(
        "{run} mixes a cold and a warm cache: {hits} of {told} requests hit it. Measure both apart (baton bench matrix --cache cold,warm)"
    )]
    MixedCache { run: String, hits: usize, told: usize },
    #[error("more than one setting changed between runs ({}): the figures do not say which one mattered", .settings.join(", "))]
    ManySettings { settings: Vec<String> },
    #[error(
        "{run} is a closed loop: a slow server got fewer requests, which hides waits. Its latencies are not those of users who do not wait for one another"
    )]
    ClosedLoop { run: String },
    #[error("{run} has a client that sent late (p99 {lag_ms_p99:.1} ms): its figures are those of the client")]
    LateClient { run: String, lag_ms_p99: f64 },
    #[error(
        "{held_back} of {samples} answers of {run} came at once: the server or a proxy holds tokens back, so their ITL and TPOT are not known and they meet no limit of either"
    )]
    HeldBack {
        run: String,
        held_back: usize,
        samples: usize,
    },
    #[error("nothing was predicted before: without an expectation no figure looks wrong (baton plan, or --hypothesis)")]
    NoPrediction,
}

/// What is known beside the runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Context {
    /// Settings that differ between the runs.
    pub changed_settings: BTreeSet<String>,
    /// A hypothesis or a prediction was stored with the runs.
    pub has_prediction: bool,
}

/// Warnings about these runs, in their order.
pub fn lint(runs: &[&Run], context: &Context) -> Vec<Warning> {
    let mut found = Vec::new();
    if !runs.is_empty() && runs.iter().all(|run| OverSaturation::of(run).is_some()) {
        found.push(Warning::OnlySaturated);
    }
    for run in runs {
        let (name, samples, lag) = (run.name.clone(), run.completed().count(), Lag::of(run));
        if samples < P99_SAMPLES_MIN {
            found.push(Warning::FewSamples {
                run: name.clone(),
                samples,
            });
        }
        let held_back = run.completed().filter(|record| !record.are_gaps_known()).count();
        if held_back > 0 {
            found.push(Warning::HeldBack {
                run: name.clone(),
                held_back,
                samples,
            });
        }
        let told = run.completed().filter(|record| record.cached_tokens.is_some()).count();
        let hits = run
            .completed()
            .filter(|record| record.cached_tokens.is_some_and(|cached| cached > 0))
            .count();
        let share = hits as f64 / told.max(1) as f64;
        if share > MIXED_SHARES.0 && share < MIXED_SHARES.1 {
            found.push(Warning::MixedCache {
                run: name.clone(),
                hits,
                told,
            });
        }
        if run.loop_kind == LoopKind::Closed {
            found.push(Warning::ClosedLoop { run: name.clone() });
        }
        if !lag.is_valid {
            found.push(Warning::LateClient {
                run: name,
                lag_ms_p99: lag.ms_p99,
            });
        }
    }
    if context.changed_settings.len() > 1 {
        let settings = context.changed_settings.iter().cloned().collect();
        found.push(Warning::ManySettings { settings });
    }
    if !context.has_prediction {
        found.push(Warning::NoPrediction);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::{later, request, run};
    use std::time::Duration;

    /// A run with nothing to complain about.
    fn good() -> Run {
        run(
            "good",
            (0..120)
                .map(|id| later(request(id, &[100, 110]), f64::from(id) * 500.0))
                .collect(),
        )
    }

    fn predicted() -> Context {
        Context {
            has_prediction: true,
            ..Context::default()
        }
    }

    fn warnings(run: &Run) -> Vec<Warning> {
        lint(&[run], &predicted())
    }

    #[test]
    fn a_good_measurement_has_no_warning() {
        assert_eq!(warnings(&good()), []);
        assert_eq!(lint(&[&good()], &Context::default()), [Warning::NoPrediction]);
    }

    #[test]
    fn each_habit_is_warned_of() {
        let mut growing = good();
        for (at, record) in (0_u64..).zip(&mut growing.records) {
            record
                .tokens
                .iter_mut()
                .chain([&mut record.ended])
                .for_each(|time| *time += Duration::from_millis(at * 400));
        }
        assert_eq!(warnings(&growing), [Warning::OnlySaturated]);
        assert_eq!(lint(&[&growing, &good()], &predicted()), []);

        let mut few = good();
        few.records.truncate(20);
        assert!(matches!(warnings(&few)[..], [Warning::FewSamples { samples: 20, .. }]));

        let mut mixed = good();
        for (at, record) in mixed.records.iter_mut().enumerate() {
            record.cached_tokens = Some(if at % 2 == 0 { 64 } else { 0 });
        }
        assert!(matches!(
            warnings(&mixed)[..],
            [Warning::MixedCache {
                hits: 60,
                told: 120,
                ..
            }]
        ));

        let mut held = good();
        held.records[7].tokens = vec![held.records[7].ended; 2];
        assert!(matches!(
            warnings(&held)[..],
            [Warning::HeldBack {
                held_back: 1,
                samples: 120,
                ..
            }]
        ));

        let closed = Run {
            loop_kind: LoopKind::Closed,
            ..good()
        };
        assert!(matches!(warnings(&closed)[..], [Warning::ClosedLoop { .. }]));

        let mut late = good();
        late.records
            .iter_mut()
            .for_each(|record| record.sent += Duration::from_millis(20));
        assert!(matches!(warnings(&late)[..], [Warning::LateClient { .. }]));

        let changed_settings: BTreeSet<String> = ["a".to_owned(), "b".to_owned()].into();
        let settings = vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(
            lint(
                &[&good()],
                &Context {
                    changed_settings,
                    ..predicted()
                }
            ),
            [Warning::ManySettings { settings }]
        );
    }
}
