//! T14: what a coordinator says of itself, beside requests that try whether it is true.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::rig::{LEASE, Rig};
use crate::MODEL;

/// T14: "readiness sampled each 100 ms".
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Between the end of a probe and the next: the cluster is there for the cell's own requests.
const PROBE_PAUSE: Duration = Duration::from_millis(250);
/// A probe of one token that takes longer has failed: a healthy cluster under six streams answers in a fraction of it.
const PROBE_WITHIN: Duration = LEASE;
/// T14's line, "at most the failure timeout": a silent node is lost after its lease. A second to notice it by requests.
pub const READY_WHILE_FAILING_MAX: Duration = Duration::from_secs(LEASE.as_secs() + 1);

#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    is_ready: bool,
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    sent: Instant,
    ended: Instant,
    is_answered: bool,
}

/// Looks and tries until it is stopped.
#[derive(Debug)]
pub struct ReadinessWatch {
    stop_probes: watch::Sender<bool>,
    stop_looks: watch::Sender<bool>,
    looks: JoinHandle<Vec<Look>>,
    probes: JoinHandle<Vec<Probe>>,
}

impl ReadinessWatch {
    pub fn start(rig: &Rig) -> Self {
        let (stop_probes, probes_over) = watch::channel(false);
        let (stop_looks, looks_over) = watch::channel(false);
        let (http, url) = (rig.cluster.http.clone(), rig.base_url().to_owned());
        Self {
            looks: tokio::spawn(look_until(looks_over, http.clone(), format!("{url}/ready"))),
            probes: tokio::spawn(probe_until(probes_over, http, format!("{url}/v1/completions"))),
            stop_probes,
            stop_looks,
        }
    }

    /// For how long at most it said ready while probe after probe failed, and how many failed.
    pub async fn stop(self) -> (Duration, usize) {
        self.stop_probes.send_replace(true);
        let probes = self.probes.await.unwrap_or_default();
        // After the last probe, or nobody would look beside it.
        self.stop_looks.send_replace(true);
        let looks = self.looks.await.unwrap_or_default();
        let failed = probes.iter().filter(|probe| !probe.is_answered).count();
        (ready_while_failing(&looks, &probes), failed)
    }
}

async fn look_until(stopped: watch::Receiver<bool>, http: reqwest::Client, url: String) -> Vec<Look> {
    let mut looks = Vec::new();
    while !*stopped.borrow() && stopped.has_changed().is_ok() {
        let at = Instant::now();
        let answer = http.get(&url).timeout(LOOK_EVERY * 5).send().await;
        let is_ready = answer.is_ok_and(|answer| answer.status().is_success());
        looks.push(Look { at, is_ready });
        tokio::time::sleep(LOOK_EVERY.saturating_sub(at.elapsed())).await;
    }
    looks
}

async fn probe_until(stopped: watch::Receiver<bool>, http: reqwest::Client, url: String) -> Vec<Probe> {
    let mut probes = Vec::new();
    while !*stopped.borrow() && stopped.has_changed().is_ok() {
        let sent = Instant::now();
        // Other tokens each time: nothing of it is in a cache.
        let prompt: Vec<u32> = (0..8).map(|i| 1_000 + (probes.len() as u32 * 8 + i) % 20_000).collect();
        let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0 });
        let answer = http.post(&url).json(&body).timeout(PROBE_WITHIN).send().await;
        probes.push(Probe {
            sent,
            ended: Instant::now(),
            is_answered: answer.is_ok_and(|answer| answer.status().is_success()),
        });
        tokio::time::sleep(PROBE_PAUSE).await;
    }
    probes
}

/// Over each stretch of failing probes, from the first one's start to that of the next that is answered, the time of the
/// looks that saw it ready; the longest.
fn ready_while_failing(looks: &[Look], probes: &[Probe]) -> Duration {
    let stretches = probes.chunk_by(|a, b| a.is_answered == b.is_answered);
    let mut ends = probes.iter().filter(|probe| probe.is_answered).map(|probe| probe.sent);
    let mut worst = Duration::ZERO;
    for stretch in stretches {
        let (Some(first), Some(last)) = (stretch.first(), stretch.last()) else {
            continue;
        };
        if first.is_answered {
            continue;
        }
        let end = ends.find(|end| *end >= first.sent).unwrap_or(last.ended);
        let is_inside = |look: &Look| look.at >= first.sent && look.at <= end;
        let inside: Vec<Look> = looks.iter().copied().filter(is_inside).collect();
        let ready = inside.windows(2).filter(|pair| pair[0].is_ready);
        worst = worst.max(ready.map(|pair| pair[1].at - pair[0].at).sum());
    }
    worst
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ready_looks_beside_failing_probes_count() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        // Ready until 2.5 s, then not, and again from 6 s on.
        let looks: Vec<Look> = (0..100)
            .map(|i| Look {
                at: at(i * 100),
                is_ready: !(25..60).contains(&i),
            })
            .collect();
        let probe = |sent, ended, is_answered| Probe {
            sent: at(sent),
            ended: at(ended),
            is_answered,
        };
        let well = [probe(0, 100, true), probe(350, 500, true)];
        assert_eq!(ready_while_failing(&looks, &well), Duration::ZERO);
        let fails = [
            probe(0, 100, true),
            probe(1_000, 3_000, false),
            probe(3_250, 5_250, false),
            probe(7_000, 7_100, true),
        ];
        // From 1.0 to 2.5 s, and from 6.0 to 7.0 s.
        assert_eq!(ready_while_failing(&looks, &fails), Duration::from_millis(2_500));
        let never_again = [probe(8_000, 9_000, false)];
        assert_eq!(ready_while_failing(&looks, &never_again), Duration::from_millis(1_000));
    }
}
