//! Five times what fits, half of it with a short timeout: a client that asks for less time may not take the others' places.
//!
//! The capacity is the same on any machine: a stand-in engine computes nothing, and each step of the decode node sleeps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use service_runtime::failpoints::FaultPoint;
use tokio::task::JoinSet;

use crate::MODEL;
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::fault_matrix::strike::REST_WITHIN;

/// The line: of half of what the same load gets without a short timeout.
pub const DEFAULT_GOODPUT_MIN: f64 = 0.9;
const OVERLOAD: f64 = 5.0;
/// A step of the decode node, however many sequences are in it.
const STEP: &str = "sleep(20)";
const SEQUENCES: u32 = 8;
const PROMPT_TOKENS: u32 = 32;
const OUTPUT_TOKENS: u32 = 16;
/// Shorter than shipped (60 s), so that the queue is as long as it gets within the warm-up.
const QUEUE_WAIT: Duration = Duration::from_secs(4);
/// Of an impatient client: six times what an answer takes that does not wait.
const SHORT_TIMEOUT: Duration = Duration::from_secs(2);
const CAPACITY_OVER: Duration = Duration::from_secs(6);
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// What a run is made of.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Each is one load without short timeouts and one with them, the order turned every time.
    pub rounds: usize,
    /// After the queue has filled.
    pub measured_over: Duration,
    pub seed: u64,
}

/// Whether a load has impatient clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clients {
    AllDefault,
    HalfImpatient,
}

/// One half of the clients of one load.
#[derive(Clone, Debug, Default)]
pub struct Half {
    /// Answers a second, within the time that is measured.
    pub goodput: f64,
    /// How all requests ended, by HTTP status; 0 is a connection that broke.
    pub by_status: BTreeMap<u16, usize>,
}

/// One load, by its two halves: every second client belongs to the second one.
#[derive(Clone, Debug)]
pub struct Load {
    pub first: Half,
    pub second: Half,
}

impl Load {
    fn goodput(&self) -> f64 {
        self.first.goodput + self.second.goodput
    }
}

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Overload {
    /// Requests a second that end when as many run as there is room for.
    pub capacity: f64,
    /// All default, and half of them impatient.
    pub rounds: Vec<(Load, Load)>,
}

impl Overload {
    /// In each round: the goodput of the default clients beside impatient ones by half of what all get without them.
    pub fn shares(&self) -> Vec<f64> {
        let share = |(calm, mixed): &(Load, Load)| mixed.first.goodput / (calm.goodput() / 2.0);
        self.rounds.iter().map(share).collect()
    }

    pub fn summary(&self) -> String {
        let mut lines = vec![format!(
            "capacity {:.1} requests/s, offered {:.1}; short timeout {SHORT_TIMEOUT:?}, queue wait {QUEUE_WAIT:?}",
            self.capacity,
            self.capacity * OVERLOAD
        )];
        for ((calm, mixed), share) in self.rounds.iter().zip(self.shares()) {
            lines.push(format!(
                "all default: {:.1}/s; beside impatient ones: default {:.1}/s {:?}, impatient {:.1}/s {:?}; share {share:.2} (line {DEFAULT_GOODPUT_MIN})",
                calm.goodput(),
                mixed.first.goodput,
                mixed.first.by_status,
                mixed.second.goodput,
                mixed.second.by_status,
            ));
        }
        lines.join("\n")
    }

    /// What was promised and did not hold.
    pub fn broken(&self) -> Vec<String> {
        let mut broken = Vec::new();
        for (share, (calm, mixed)) in self.shares().into_iter().zip(&self.rounds) {
            if share < DEFAULT_GOODPUT_MIN {
                broken.push(format!("default clients got {share:.2} of their half"));
            }
            // Otherwise there was no overload, or something else than the queue decided.
            if calm.goodput() > self.capacity * 1.25 || calm.goodput() < self.capacity * 0.5 {
                broken.push(format!(
                    "{:.1} answers a second under load where {:.1} fit",
                    calm.goodput(),
                    self.capacity
                ));
            }
            for half in [&calm.first, &calm.second, &mixed.first, &mixed.second] {
                let strange = half
                    .by_status
                    .keys()
                    .filter(|status| ![200, 429, 504].contains(*status));
                broken.extend(strange.map(|status| format!("a request ended with status {status}")));
            }
        }
        broken
    }
}

/// # Errors
/// The rig broke.
pub async fn run(plan: Plan, told: impl Fn(&Load)) -> Result<Overload> {
    let options = RigOptions {
        engine: Some("stand-in"),
        max_num_seqs: Some(SEQUENCES),
        prefix_cache: false,
        coordinator_flags: vec![format!("--queue-wait-ms-max={}", QUEUE_WAIT.as_millis())],
        ..RigOptions::new("1p1d", plan.seed)
    };
    let rig = Rig::start(&options).await?;
    rig.wait_until_whole().await?;
    for name in rig.names("decode") {
        ensure!(
            rig.arm(&name, (FaultPoint::MidDecode, STEP)).await,
            "{name} cannot be armed"
        );
    }
    let source = Arc::new(Source {
        http: reqwest::Client::builder().timeout(ANSWER_WITHIN).build()?,
        url: format!("{}/v1/completions", rig.base_url()),
    });
    let capacity = capacity(&source).await;
    let mut run = Overload {
        capacity,
        rounds: Vec::new(),
    };
    for round in 0..plan.rounds {
        let mut order = [Clients::AllDefault, Clients::HalfImpatient];
        if round % 2 == 1 {
            order.reverse();
        }
        let mut loads = Vec::new();
        for clients in order {
            let load = load(&source, clients, (capacity * OVERLOAD, plan.measured_over)).await;
            told(&load);
            loads.push((clients, load));
            rig.wait_for_rest(REST_WITHIN).await?;
        }
        loads.sort_by_key(|(clients, _)| *clients != Clients::AllDefault);
        let mut loads = loads.into_iter().map(|(_, load)| load);
        run.rounds.extend(loads.next().zip(loads.next()));
    }
    rig.stop().await?;
    Ok(run)
}

#[derive(Debug)]
struct Source {
    http: reqwest::Client,
    url: String,
}

impl Source {
    /// The HTTP status of one request, 0 when its connection broke.
    async fn ask(&self, number: usize, timeout: Option<Duration>) -> u16 {
        // Another prompt each time.
        let first = u32::try_from(number % 40_000).unwrap_or_default();
        let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|i| first + i).collect();
        let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": true });
        let mut request = self.http.post(&self.url).json(&body);
        if let Some(timeout) = timeout {
            request = request.header("x-request-timeout-ms", timeout.as_millis().to_string());
        }
        let Ok(answer) = request.send().await else { return 0 };
        let status = answer.status().as_u16();
        answer.bytes().await.map_or(0, |_| status)
    }
}

/// With twice as many clients as there is room for.
async fn capacity(source: &Arc<Source>) -> f64 {
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for client in 0..SEQUENCES as usize * 2 {
        let source = source.clone();
        clients.spawn(async move {
            let mut ends = Vec::new();
            for turn in 0.. {
                if started.elapsed() > CAPACITY_OVER {
                    break;
                }
                if source.ask(client * 1_000 + turn, None).await == 200 {
                    ends.push(started.elapsed());
                }
            }
            ends
        });
    }
    let ends = clients.join_all().await;
    let counted = CAPACITY_OVER / 3..CAPACITY_OVER;
    let in_time = ends
        .iter()
        .flatten()
        .filter(|end: &&Duration| counted.contains(*end))
        .count();
    in_time.max(1) as f64 / (counted.end - counted.start).as_secs_f64()
}

/// An open loop with even gaps; clients of the two halves take turns.
async fn load(source: &Arc<Source>, clients: Clients, (per_second, over): (f64, Duration)) -> Load {
    let started = tokio::time::Instant::now();
    let warm_up = QUEUE_WAIT + SHORT_TIMEOUT;
    let counted = warm_up..warm_up + over;
    let ended: Arc<Mutex<Vec<(usize, u16, Duration)>>> = Arc::default();
    let mut running = JoinSet::new();
    for number in 0.. {
        let at = Duration::from_secs_f64(number as f64 / per_second);
        if at >= counted.end {
            break;
        }
        tokio::time::sleep_until(started + at).await;
        while running.try_join_next().is_some() {}
        let half = number % 2;
        let is_impatient = clients == Clients::HalfImpatient && half == 1;
        let (source, ended) = (source.clone(), ended.clone());
        running.spawn(async move {
            let status = source.ask(number, is_impatient.then_some(SHORT_TIMEOUT)).await;
            let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            ended.push((half, status, started.elapsed()));
        });
    }
    running.join_all().await;
    let ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
    let of_half = |half: usize| {
        let mut of_half = Half::default();
        let mut good = 0_u32;
        for (_, status, at) in ended.iter().filter(|(of, _, _)| *of == half) {
            *of_half.by_status.entry(*status).or_default() += 1;
            good += u32::from(*status == 200 && counted.contains(at));
        }
        of_half.goodput = f64::from(good) / over.as_secs_f64();
        of_half
    };
    Load {
        first: of_half(0),
        second: of_half(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(first: f64, second: f64) -> Load {
        let half = |goodput| Half {
            goodput,
            by_status: BTreeMap::from([(200, 1), (429, 1)]),
        };
        Load {
            first: half(first),
            second: half(second),
        }
    }

    #[test]
    fn default_clients_are_compared_with_half_of_the_calm_load() {
        let run = |mixed| Overload {
            capacity: 20.0,
            rounds: vec![(load(10.0, 10.0), mixed)],
        };
        assert_eq!(run(load(9.0, 11.0)).broken(), [""; 0]);
        assert_eq!(run(load(20.0, 0.0)).shares(), [2.0]);
        assert_eq!(run(load(1.0, 19.0)).broken().len(), 1);
    }
}
