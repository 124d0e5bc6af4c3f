//! T8: three times more work than fits, deadlines of 0.2 to 10 s (and one of 45 s), faults all the time: nobody waits beyond his deadline.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use futures::StreamExt as _;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::chaos_proxy::Fault;
use crate::fault_matrix::campaign;
use crate::fault_matrix::client::{self, Manner, Seen};
use crate::fault_matrix::nodes::Nodes;
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::fault_matrix::strike::REST_WITHIN;
use crate::fault_matrix::verdict::{Connection, Outcome, judge};

/// T8's line: how late an answer may be.
pub const LATE_MAX: Duration = Duration::from_millis(250);
/// Deadlines of requests to nodes on the processors; on GPUs they are longer, as the answers are.
const DEADLINES_MS: std::ops::Range<f64> = 200.0..10_000.0;
/// Four sequences run well on two cores with two nodes of each kind.
const CONCURRENCY: usize = 24;
/// Different prompts; the pools forget one before it comes again.
const PROMPTS_MAX: usize = 48;
const WITHIN: Duration = Duration::from_secs(60);
/// Of the last request.
const LONG_DEADLINE: Duration = Duration::from_secs(45);
const FAULT_EVERY: Duration = Duration::from_secs(3);

/// What a run of deadlines measured.
#[derive(Clone, Debug, Default)]
pub struct Deadlines {
    pub requests: usize,
    pub completed: usize,
    pub failed: usize,
    pub faults: usize,
    /// Beyond the deadline, of those that ended after it.
    pub late: Vec<Duration>,
    pub violations: Vec<String>,
    /// After the last answer, until no node held a block or computed.
    pub to_rest: Duration,
    /// Committed handoffs by transport.
    pub handoffs: BTreeMap<String, u64>,
}

/// # Errors
/// The rig broke.
pub async fn run(requests: usize, nodes: Nodes, seed: u64) -> Result<Deadlines> {
    let options = RigOptions::of(nodes, "2p2d", seed);
    let (cases, answers) = campaign::baseline(nodes, requests.min(PROMPTS_MAX), seed).await?;
    let rig = Rig::start(&options).await?;
    let mut random = StdRng::seed_from_u64(seed);
    let plan = |i: usize| {
        let deadline =
            (DEADLINES_MS.start.ln() + random.random::<f64>() * (DEADLINES_MS.end / DEADLINES_MS.start).ln()).exp();
        // A slow machine may end nothing within the others'. It has this one for itself in the end.
        let deadline = match i + 1 == requests {
            true => LONG_DEADLINE,
            false => nodes.patience(Duration::from_secs_f64(deadline / 1000.0)),
        };
        (i % cases.len(), deadline)
    };
    let plans: Vec<(usize, Duration)> = (0..requests).map(plan).collect();
    let (rig_ref, cases_ref) = (&rig, &cases);
    let running = futures::stream::iter(plans)
        .map(|(which, deadline)| async move {
            let manner = Manner {
                deadline: Some(deadline),
                ..Manner::staying(WITHIN)
            };
            let seen = client::stream(&rig_ref.cluster.http, rig_ref.base_url(), &cases_ref[which], manner).await;
            (which, deadline, seen)
        })
        .buffer_unordered(CONCURRENCY)
        .collect::<Vec<_>>();
    let mut fault_random = StdRng::seed_from_u64(seed.wrapping_add(1));
    let mut faults = 0;
    let ended = tokio::select! {
        ended = running => ended,
        () = disturb(&rig, &mut fault_random, &mut faults) => Vec::new(),
    };
    heal(&rig);
    let mut run = Deadlines {
        requests: ended.len(),
        faults,
        ..Deadlines::default()
    };
    for (which, deadline, seen) in ended {
        run.add(deadline, &seen, judge(Connection::Holds, &seen, &answers[which]));
    }
    run.to_rest = rig.wait_for_rest(REST_WITHIN).await?;
    run.handoffs = rig.handoffs().await?;
    run.violations.extend(rig.wrong_sums());
    run.violations.extend(rig.stop().await?.violations);
    Ok(run)
}

impl Deadlines {
    fn add(&mut self, deadline: Duration, seen: &Seen, judged: Result<Outcome, String>) {
        if let Some(late) = seen.took.checked_sub(deadline) {
            self.late.push(late);
            if late > LATE_MAX {
                self.violations.push(format!(
                    "{late:?} after a deadline of {deadline:?}: {:?}",
                    seen.terminals
                ));
            }
        }
        match judged {
            Ok(Outcome::Completed) => self.completed += 1,
            Ok(_) => self.failed += 1,
            Err(what) => self.violations.push(what),
        }
    }
}

/// One fault after another, for ever.
async fn disturb(rig: &Rig, random: &mut StdRng, faults: &mut usize) {
    loop {
        tokio::time::sleep(FAULT_EVERY).await;
        *faults += 1;
        let lasts = Duration::from_millis(random.random_range(500..3_000));
        let nodes: Vec<String> = ["prefill", "decode"].iter().flat_map(|role| rig.names(role)).collect();
        match random.random_range(0..5) {
            0 => rig.damage_links(Fault::Reset),
            1 => rig.damage_links(Fault::Blackhole),
            2 => rig.damage_links(Fault::Rate { bytes_per_second: 1024 }),
            // Only KV has sums. Other bytes of a link have those of TCP, which are before the proxy.
            3 if rig.nodes().is_kv_on_link() => rig.damage_links(Fault::FlipBits { chunks: 4 }),
            _ => rig.pause(&nodes[random.random_range(0..nodes.len())]),
        }
        tokio::time::sleep(lasts).await;
        heal(rig);
    }
}

fn heal(rig: &Rig) {
    rig.heal_links();
    for role in ["prefill", "decode"] {
        for name in rig.names(role) {
            rig.resume(&name);
        }
    }
}
