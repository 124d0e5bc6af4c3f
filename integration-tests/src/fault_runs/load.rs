//! An open loop: requests leave at their own times, whatever becomes of those before them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use futures::StreamExt as _;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

use crate::fault_matrix::campaign;
use crate::fault_matrix::client::{self, Manner, Seen};
use crate::fault_matrix::nodes::Nodes;
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::token_exact::{Answer, Case};
use crate::wait::wait_until;

/// Short requests: what a fault costs is to be seen, not what a long prompt costs.
pub const SHORT_PROMPT_TOKENS: Range<usize> = 32..96;
/// Twice what the capacity is measured with. More are there only when the machine has become slower than it was then, as
/// one that is shared does: what is due then waits at the client, and is counted.
const IN_FLIGHT_MAX: usize = 32;
/// Enough to keep four nodes busy.
const CAPACITY_CONCURRENCY: usize = 16;
const WITHIN: Duration = Duration::from_secs(60);

/// One request that ended.
#[derive(Clone, Debug)]
pub struct Sent {
    /// Which of the prompts.
    pub which: usize,
    pub started: Instant,
    pub seen: Seen,
}

impl Sent {
    pub fn ran_at(&self, moment: Instant) -> bool {
        self.started <= moment && moment < self.started + self.seen.took
    }

    /// When its tokens came.
    pub fn arrivals(&self) -> impl Iterator<Item = Instant> {
        self.seen.arrivals.iter().map(|after| self.started + *after)
    }
}

/// How a run under load is made.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub nodes: Nodes,
    /// Different ones.
    pub prompts: usize,
    pub rate: Rate,
    /// Load without a fault before each fault.
    pub calm: Duration,
    /// How long a client tries again to get an answer to begin.
    pub reconnects_within: Duration,
    pub seed: u64,
}

impl Terms {
    /// The same load on other nodes. Slower ones are measured for longer.
    pub fn on(self, nodes: Nodes) -> Self {
        let rate = match self.rate {
            Rate::OfCapacity { share, over } => Rate::OfCapacity {
                share,
                over: nodes.patience(over),
            },
            rate @ Rate::PerSecond(_) => rate,
        };
        Self { nodes, rate, ..self }
    }
}

/// How many requests are offered.
#[derive(Clone, Copy, Debug)]
pub enum Rate {
    /// A share of what the cluster can do, which is measured first, for so long.
    OfCapacity { share: f64, over: Duration },
    /// A small run has no time for that.
    PerSecond(f64),
}

/// Requests a second; a capacity that was not measured is zero.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    pub capacity: f64,
    pub offered: f64,
}

/// A cluster for a run under load: every request is a handoff, and the retry budget is as shipped.
pub fn rig_options(terms: Terms) -> RigOptions {
    RigOptions {
        prefix_cache: false,
        retries_free_per_minute: 10,
        ..RigOptions::of(terms.nodes, "2p2d", terms.seed)
    }
}

/// Short prompts with their fault-free answers.
///
/// # Errors
/// As [`campaign::baseline`].
pub async fn baseline(terms: Terms) -> Result<(Vec<Case>, Vec<Answer>)> {
    campaign::baseline_of(terms.nodes, terms.prompts, SHORT_PROMPT_TOKENS, terms.seed).await
}

#[derive(Debug, Default)]
struct Shared {
    held_back: AtomicUsize,
    running: Mutex<BTreeMap<usize, Instant>>,
    ended: Mutex<Vec<Sent>>,
}

/// Requests leave until it is stopped.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Load {
    /// With exponential gaps, each prompt in turn.
    pub async fn start(rig: &Rig, cases: &[Case], terms: Terms) -> (Self, Rates) {
        let (capacity, offered) = match terms.rate {
            Rate::PerSecond(offered) => (0.0, offered),
            Rate::OfCapacity { share, over } => {
                let capacity = capacity(rig, cases, over).await;
                (capacity, capacity * share)
            }
        };
        let rates = Rates { capacity, offered };
        let (stop, stopped) = oneshot::channel();
        let shared = Arc::<Shared>::default();
        let source = Source {
            http: rig.cluster.http.clone(),
            url: rig.base_url().to_owned(),
            cases: cases.to_vec(),
            reconnects_within: terms.reconnects_within,
            shared: shared.clone(),
        };
        let pace = (rates.offered, terms.seed);
        let task = tokio::spawn(send_until(stopped, Arc::new(source), pace));
        (Self { shared, stop, task }, rates)
    }

    /// Waits until every request that left before `moment` has ended.
    ///
    /// # Errors
    /// One runs for longer than any may.
    pub async fn wait_for_those_before(&self, moment: Instant) -> Result<()> {
        wait_until("the requests of before", WITHIN * 2, || {
            let running = lock(&self.shared.running);
            let left = running.values().filter(|started| **started < moment).count();
            std::future::ready(if left == 0 { Ok(()) } else { Err(left) })
        })
        .await
    }

    /// Waits until a request has ended that had a token after `moment`.
    ///
    /// # Errors
    /// None has for longer than any request may take.
    pub async fn wait_for_a_token_after(&self, moment: Instant) -> Result<()> {
        wait_until("a token after the fault", WITHIN * 2, || {
            let ended = lock(&self.shared.ended);
            let is_there = ended.iter().any(|sent| sent.arrivals().any(|at| at > moment));
            std::future::ready(if is_there { Ok(()) } else { Err(ended.len()) })
        })
        .await
    }

    /// No more requests; those that run come to their end.
    ///
    /// # Errors
    /// The sender broke.
    pub async fn stop(self) -> Result<Ended> {
        let _ = self.stop.send(());
        self.task.await?;
        Ok(Ended {
            sent: std::mem::take(&mut *lock(&self.shared.ended)),
            held_back: self.shared.held_back.load(Ordering::Relaxed),
        })
    }
}

/// All requests of a load.
#[derive(Clone, Debug)]
pub struct Ended {
    pub sent: Vec<Sent>,
    /// Of these so many left late, because the client had too many running.
    pub held_back: usize,
}

struct Source {
    http: reqwest::Client,
    url: String,
    cases: Vec<Case>,
    reconnects_within: Duration,
    shared: Arc<Shared>,
}

async fn send_until(mut stopped: oneshot::Receiver<()>, source: Arc<Source>, (per_second, seed): (f64, u64)) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut requests = JoinSet::new();
    let mut next = tokio::time::Instant::now();
    for number in 0.. {
        next += Duration::from_secs_f64(-(1.0 - random.random::<f64>()).ln() / per_second);
        let is_due = async {
            tokio::time::sleep_until(next).await;
            while requests.try_join_next().is_some() {}
            let is_held_back = requests.len() >= IN_FLIGHT_MAX;
            source
                .shared
                .held_back
                .fetch_add(usize::from(is_held_back), Ordering::Relaxed);
            while requests.len() >= IN_FLIGHT_MAX {
                requests.join_next().await;
            }
        };
        tokio::select! {
            _ = &mut stopped => break,
            () = is_due => {}
        }
        // Late is late: what was held back is not sent in a burst.
        next = next.max(tokio::time::Instant::now());
        requests.spawn(one(source.clone(), number));
    }
    while requests.join_next().await.is_some() {}
}

async fn one(source: Arc<Source>, number: usize) {
    let (which, started) = (number % source.cases.len(), Instant::now());
    lock(&source.shared.running).insert(number, started);
    let manner = Manner {
        reconnects_within: source.reconnects_within,
        ..Manner::staying(WITHIN)
    };
    let seen = client::stream(&source.http, &source.url, &source.cases[which], manner).await;
    lock(&source.shared.running).remove(&number);
    lock(&source.shared.ended).push(Sent { which, started, seen });
}

/// Requests that end in a second while a fixed number run, over the last two thirds of `lasts`.
async fn capacity(rig: &Rig, cases: &[Case], lasts: Duration) -> f64 {
    let started = Instant::now();
    let endless = (0..).take_while(|_| started.elapsed() < lasts);
    let ends = futures::stream::iter(endless)
        .map(|i: usize| async move {
            let case = &cases[i % cases.len()];
            client::stream(&rig.cluster.http, rig.base_url(), case, Manner::staying(WITHIN)).await;
            started.elapsed()
        })
        .buffer_unordered(CAPACITY_CONCURRENCY)
        .collect::<Vec<Duration>>()
        .await;
    // What ends earlier began on a cluster that was filling, what ends later ran on one that was emptying.
    let counted = lasts / 3..lasts;
    let in_time = ends.iter().filter(|end: &&Duration| counted.contains(*end)).count();
    in_time.max(1) as f64 / (counted.end - counted.start).as_secs_f64()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
