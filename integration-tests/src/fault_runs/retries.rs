//! T22: three in ten transfers fail for a while; retries do not amplify, and everything is as before soon after.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::StreamExt as _;
use service_runtime::failpoints::FaultPoint;

use crate::PROSE;
use crate::fault_matrix::campaign;
use crate::fault_matrix::client::{self, Ending, Manner, Terminal};
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::token_exact::tokenize;

/// The limit of row T22 in `docs/measurements/reliability.md`.
pub const ATTEMPTS_PER_REQUEST_MAX: f64 = 1.2;
pub const RECOVERED_WITHIN: Duration = Duration::from_secs(10);
/// Texts are not compared here: the matrix does that.
const PROMPTS: usize = 24;
const CONCURRENCY: usize = 6;
const WITHIN: Duration = Duration::from_secs(60);

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Retries {
    pub requests: usize,
    pub failed_requests: usize,
    pub retries: f64,
    pub failed_transfers: f64,
    /// After the faults ended: requests, how many failed, and when the last retry or failure was seen.
    pub requests_after: usize,
    pub recovered_after: Duration,
}

impl Retries {
    pub fn attempts_per_request(&self) -> f64 {
        1.0 + self.retries / self.requests.max(1) as f64
    }
}

/// Three in ten transfers fail for `faulty`, then none for `healed`. The retry budget is the coordinator's default.
///
/// # Errors
/// The rig broke.
pub async fn run(faulty: Duration, healed: Duration, seed: u64) -> Result<Retries> {
    let options = RigOptions {
        retries_free_per_minute: 10,
        prefix_cache: false,
        ..RigOptions::new("2p2d", seed)
    };
    let rig = Rig::start(&options).await?;
    let text = tokenize(&rig.cluster.http, rig.base_url(), PROSE).await?;
    let cases = campaign::cases(&text, PROMPTS, seed);
    for name in rig.names("prefill") {
        let armed = rig
            .arm(&name, (FaultPoint::TransferNearlyDone, "30%return(fault)"))
            .await;
        anyhow::ensure!(armed, "{name} cannot be armed");
    }
    let before = totals(&rig).await?;
    let ended = load(&rig, &cases, faulty).await;
    let after = totals(&rig).await?;
    let mut run = Retries {
        requests: ended.len(),
        failed_requests: ended.iter().filter(|(_, good)| !good).count(),
        retries: after.0 - before.0,
        failed_transfers: after.1 - before.1,
        ..Retries::default()
    };
    for name in rig.names("prefill") {
        rig.arm(&name, (FaultPoint::TransferNearlyDone, "off")).await;
    }
    let healed_at = Instant::now();
    let watched = async {
        let mut last = (after.0, Duration::ZERO);
        while healed_at.elapsed() < healed {
            let now = totals(&rig).await?;
            if now.0 > last.0 {
                last = (now.0, healed_at.elapsed());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(last.1)
    };
    let (ended, last_retry) = tokio::join!(load(&rig, &cases, healed), watched);
    let failures = ended.iter().filter(|(_, good)| !good);
    let last_failure = failures.map(|(at, _)| at.saturating_duration_since(healed_at)).max();
    run.requests_after = ended.len();
    run.recovered_after = last_retry?.max(last_failure.unwrap_or_default());
    let findings = rig.stop().await?;
    anyhow::ensure!(findings.violations.is_empty(), "{:?}", findings.violations);
    Ok(run)
}

/// Retries and failed handoffs so far, by the coordinator's account.
async fn totals(rig: &Rig) -> Result<(f64, f64)> {
    let scrape = rig.cluster.metrics().await.context("metrics")?;
    // A family without samples has no failures yet.
    let retries = scrape.sum("baton_handoff_retries_total", &[]).unwrap_or(0.0);
    let failed = scrape
        .sum("baton_handoffs_total", &[("outcome", "failed")])
        .unwrap_or(0.0);
    Ok((retries, failed))
}

/// A steady number of requests at a time; each one's end, and whether it was answered.
async fn load(rig: &Rig, cases: &[crate::token_exact::Case], lasts: Duration) -> Vec<(Instant, bool)> {
    let started = Instant::now();
    let endless = (0..).take_while(|_| started.elapsed() < lasts);
    futures::stream::iter(endless)
        .map(|i: usize| async move {
            let manner = Manner::staying(WITHIN);
            let seen = client::stream(&rig.cluster.http, rig.base_url(), &cases[i % cases.len()], manner).await;
            let is_finished = matches!(seen.terminals.as_slice(), [Terminal::Finished(_)]);
            (Instant::now(), seen.ending == Some(Ending::Whole) && is_finished)
        })
        .buffer_unordered(CONCURRENCY)
        .collect()
        .await
}
