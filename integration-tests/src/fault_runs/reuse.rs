//! T5: a pool so small that blocks are given out again at once, a link so slow that aborts meet transfers: no text changes.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::oneshot;

use crate::chaos_proxy::Fault;
use crate::fault_matrix::campaign;
use crate::fault_matrix::client::{self, Manner};
use crate::fault_matrix::nodes::Nodes;
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::fault_matrix::strike::REST_WITHIN;
use crate::fault_matrix::verdict::{Connection, Outcome, judge};

/// A prompt's KV takes a third of a second. KV that passes no link is not slowed.
const LINK_BYTES_PER_SECOND: u64 = 24 << 20;
const REQUESTS: usize = 4;
/// Different prompts; the tiny pool forgets one before it comes again.
const PROMPTS_MAX: usize = 48;
/// Of these so many leave, at a time at which their transfer is most likely under way.
const LEAVING: usize = 2;
const LEAVE_WITHIN: Duration = Duration::from_millis(900);
const WITHIN: Duration = Duration::from_secs(60);

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Reuse {
    pub rounds: usize,
    pub compared_texts: usize,
    pub left: usize,
    pub failed: usize,
    /// Transfers that ended before their commit, by the coordinator's account.
    pub broken_off: f64,
    /// Committed handoffs by transport.
    pub handoffs: BTreeMap<String, u64>,
    pub violations: Vec<String>,
}

/// # Errors
/// The rig broke.
pub async fn run(rounds: usize, nodes: Nodes, seed: u64) -> Result<Reuse> {
    let options = RigOptions {
        kv_cache_memory: nodes.tiny_pool().to_owned(),
        ..RigOptions::of(nodes, "1p1d", seed)
    };
    let (cases, answers) = campaign::baseline(nodes, (rounds * REQUESTS).min(PROMPTS_MAX), seed).await?;
    let rig = Rig::start(&options).await?;
    rig.damage_links(Fault::Rate {
        bytes_per_second: LINK_BYTES_PER_SECOND,
    });
    let mut random = StdRng::seed_from_u64(seed);
    let mut run = Reuse {
        rounds,
        ..Reuse::default()
    };
    for round in 0..rounds {
        let requests = (0..REQUESTS).map(|i| {
            let which = (round * REQUESTS + i) % cases.len();
            let leave_after = (i < LEAVING).then(|| nodes.patience(LEAVE_WITHIN).mul_f64(random.random()));
            (which, leave_after)
        });
        let requests: Vec<(usize, Option<Duration>)> = requests.collect();
        let running = requests
            .iter()
            .map(|(which, leave_after)| one(&rig, &cases[*which], *leave_after));
        let seen = join_all(running).await;
        for ((which, leave_after), seen) in requests.iter().zip(seen) {
            match judge(Connection::Holds, &seen, &answers[*which]) {
                Ok(Outcome::Left) => run.left += 1,
                Ok(Outcome::Completed) => run.compared_texts += 1,
                Ok(_) => run.failed += 1,
                Err(what) => run
                    .violations
                    .push(format!("round {round}: {what} (leaves after {leave_after:?})")),
            }
        }
    }
    rig.wait_for_rest(REST_WITHIN).await.context("after the last round")?;
    let scrape = rig.cluster.metrics().await?;
    let ended = |outcome| {
        scrape
            .sum("baton_handoffs_total", &[("outcome", outcome)])
            .unwrap_or(0.0)
    };
    run.broken_off = ended("cancelled") + ended("failed");
    run.handoffs = rig.handoffs().await?;
    run.violations.extend(rig.wrong_sums());
    run.violations.extend(rig.stop().await?.violations);
    Ok(run)
}

async fn one(rig: &Rig, case: &crate::token_exact::Case, leave_after: Option<Duration>) -> client::Seen {
    let (leave, left) = oneshot::channel();
    let manner = Manner {
        leave: left,
        ..Manner::staying(WITHIN)
    };
    let leaving = async {
        if let Some(after) = leave_after {
            tokio::time::sleep(after).await;
            let _ = leave.send(());
        }
        std::future::pending().await
    };
    tokio::select! {
        seen = client::stream(&rig.cluster.http, rig.base_url(), case, manner) => seen,
        never = leaving => never,
    }
}
