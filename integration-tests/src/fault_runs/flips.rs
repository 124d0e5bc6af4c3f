//! T5: one bit of one chunk of KV is turned on the wire, again and again; each time the transfer fails and the text does not.

use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::chaos_proxy::Fault;
use crate::fault_matrix::campaign;
use crate::fault_matrix::client::{self, Manner};
use crate::fault_matrix::nodes::Nodes;
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::fault_matrix::verdict::{Connection, Outcome, judge};

/// Different prompts; without a prefix cache they may come again.
const PROMPTS_MAX: usize = 32;
const WITHIN: Duration = Duration::from_secs(60);

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Flips {
    pub flipped: u64,
    /// Rounds with a flip after which the coordinator counts a handoff more that failed.
    pub detected: u64,
    pub completed: usize,
    pub violations: Vec<String>,
}

/// One request and one turned bit in each round. The nodes' KV must pass the link ([`Nodes::is_kv_on_link`]).
///
/// # Errors
/// The rig broke.
pub async fn run(rounds: usize, nodes: Nodes, seed: u64) -> Result<Flips> {
    let options = RigOptions {
        prefix_cache: false,
        ..RigOptions::of(nodes, "1p1d", seed)
    };
    let (cases, answers) = campaign::baseline(nodes, rounds.min(PROMPTS_MAX), seed).await?;
    let rig = Rig::start(&options).await?;
    let mut run = Flips::default();
    for round in 0..rounds {
        rig.wait_until_whole().await?;
        let before = failed(&rig).await?;
        let flipped = rig.flipped_chunks();
        rig.damage_links(Fault::FlipBits { chunks: 1 });
        let which = round % cases.len();
        let manner = Manner::staying(WITHIN);
        let seen = client::stream(&rig.cluster.http, rig.base_url(), &cases[which], manner).await;
        match judge(Connection::Holds, &seen, &answers[which]) {
            Ok(Outcome::Completed) => run.completed += 1,
            Ok(_) => {}
            Err(what) => run.violations.push(format!("round {round}: {what}")),
        }
        let flips = rig.flipped_chunks() - flipped;
        run.flipped += flips;
        run.detected += u64::from(flips > 0 && failed(&rig).await? > before);
    }
    run.violations.extend(rig.wrong_sums());
    run.violations.extend(rig.stop().await?.violations);
    Ok(run)
}

async fn failed(rig: &Rig) -> Result<f64> {
    let scrape = rig.cluster.metrics().await.context("metrics")?;
    Ok(scrape
        .sum("baton_handoffs_total", &[("outcome", "failed")])
        .unwrap_or(0.0))
}
