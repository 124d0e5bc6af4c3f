//! Many streams run on two decode nodes and one of the two dies in the middle: every stream ends in the fault-free tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::future::join_all;
use service_runtime::failpoints::FaultPoint;

use super::placements::get;
use super::quantile;
use crate::fault_matrix::campaign;
use crate::fault_matrix::client::{self, Manner};
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::fault_matrix::strike::{REST_WITHIN, RESTART_AFTER};
use crate::fault_matrix::verdict::{Connection, Outcome, judge};
use crate::token_exact::OUTPUT_TOKENS;
use crate::wait::wait_until;

/// Tiny, and each step of a decode node takes this much longer until all streams have begun: none is to end before.
const PROMPT_TOKENS: Range<usize> = 8..24;
const SLOWED: &str = "sleep(200)";
/// Half of the streams after the death move to the node that has the other half: room for all on one.
const POOL: &str = "512MiB";
/// A hundred streams on one node that shares two cores with three others.
const WITHIN: Duration = Duration::from_secs(180);

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Migrations {
    pub streams: usize,
    pub rounds: usize,
    pub completed: usize,
    /// Streams that had had a token from the node that died, and of these how many were sampled.
    pub migrated: usize,
    pub migrated_sampled: usize,
    /// A moment before each death, by the coordinator's records.
    pub at_death: Vec<Running>,
    /// Of each migrated stream: its longest gap about the kill, less its median gap from then on.
    pub extra_gaps: Vec<Duration>,
    /// The longest gap at that time of the streams that stayed where they were, less their median: what the others' move
    /// cost them.
    pub stayed_gaps: Vec<Duration>,
    pub violations: Vec<String>,
}

/// How far the streams of a round are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Running {
    pub waiting: usize,
    /// In mid-stream, by decode node.
    pub in_mid_stream: BTreeMap<String, usize>,
    pub ended: usize,
}

impl Migrations {
    pub fn summary(&self) -> String {
        let ms = |of: &[Duration], q| quantile(of, q).as_millis();
        let (extra, stayed) = (&self.extra_gaps, &self.stayed_gaps);
        format!(
            "{} x {} streams, {} completed, {} migrated in mid-stream ({} sampled); before each death {:?}\nextra gap of those: p50 {} ms, p99 {} ms, max {} ms; of the {} that stayed: p50 {} ms, p99 {} ms",
            self.rounds,
            self.streams,
            self.completed,
            self.migrated,
            self.migrated_sampled,
            self.at_death,
            ms(extra, 0.5),
            ms(extra, 0.99),
            ms(extra, 1.0),
            stayed.len(),
            ms(stayed, 0.5),
            ms(stayed, 0.99),
        )
    }
}

/// `streams` at once, `rounds` times.
///
/// # Errors
/// The rig broke.
pub async fn run(streams: usize, rounds: usize, seed: u64) -> Result<Migrations> {
    let sequences = u32::try_from(streams).context("too many streams")?;
    let options = RigOptions {
        kv_cache_memory: POOL.to_owned(),
        max_num_seqs: Some(sequences),
        prefix_cache: false,
        retries_free_per_minute: 10,
        ..RigOptions::new("2p2d", seed)
    };
    let (cases, answers) = campaign::baseline_of(options.nodes, streams, PROMPT_TOKENS, seed).await?;
    let mut rig = Rig::start(&options).await?;
    let mut run = Migrations {
        streams,
        rounds,
        ..Migrations::default()
    };
    for round in 0..rounds {
        let before = last_record(&rig).await?;
        arm_decode_nodes(&rig, SLOWED).await?;
        let url = rig.base_url().to_owned();
        let http = rig.cluster.http.clone();
        let sending = cases.iter().map(|case| {
            let (http, url, case) = (http.clone(), url.clone(), case.clone());
            tokio::spawn(async move {
                let started = Instant::now();
                (
                    started,
                    client::stream(&http, &url, &case, Manner::staying(WITHIN)).await,
                )
            })
        });
        let running: Vec<_> = sending.collect();
        run.at_death.push(wait_for_the_middle(&rig, (streams, before)).await?);
        let victim = format!("decode-{}", round % 2);
        let killed = Instant::now();
        rig.kill(&victim).await?;
        arm_decode_nodes(&rig, "off").await?;
        let seen = join_all(running).await;
        let migrated = migrated(&rig, streams).await?;
        for (i, seen) in seen.into_iter().enumerate() {
            let (started, seen) = seen.context("a client broke")?;
            match judge(Connection::Holds, &seen, &answers[i]) {
                Ok(Outcome::Completed) if seen.kv_hashes.is_empty() => {
                    run.violations
                        .push(format!("round {round}: stream {i} has no KV hashes"));
                }
                Ok(Outcome::Completed) => run.completed += 1,
                Ok(_) => run
                    .violations
                    .push(format!("round {round}: stream {i} ended by {:?}", seen.terminals)),
                Err(what) => run.violations.push(format!("round {round}: stream {i}: {what}")),
            }
            let arrivals: Vec<Instant> = seen.arrivals.iter().map(|after| started + *after).collect();
            // Placed again after its first token: before it, nothing was moved.
            let is_placed_again = seen.request_id.as_ref().is_some_and(|id| migrated.contains(id));
            let is_migrated = is_placed_again && arrivals.first().is_some_and(|first| *first < killed);
            let Some(extra) = extra_gap(&arrivals, killed) else {
                continue;
            };
            if is_migrated {
                run.migrated += 1;
                run.migrated_sampled += usize::from(cases[i].temperature > 0.0);
                run.extra_gaps.push(extra);
            } else if !is_placed_again {
                run.stayed_gaps.push(extra);
            }
        }
        rig.wait_for_rest(REST_WITHIN).await?;
        tokio::time::sleep(RESTART_AFTER).await;
        rig.restart(&victim).await?;
        rig.wait_until_whole().await?;
    }
    run.violations.extend(rig.wrong_sums());
    run.violations.extend(rig.stop().await?.violations);
    Ok(run)
}

async fn arm_decode_nodes(rig: &Rig, actions: &str) -> Result<()> {
    for name in rig.names("decode") {
        wait_until("a point armed", WITHIN, || async {
            match rig.arm(&name, (FaultPoint::MidDecode, actions)).await {
                true => Ok(()),
                false => Err("no answer"),
            }
        })
        .await?;
    }
    Ok(())
}

/// Until every stream has begun; half of all tokens is late enough, whoever is missing.
async fn wait_for_the_middle(rig: &Rig, (streams, before): (usize, u64)) -> Result<Running> {
    let all = streams as u64 * u64::from(OUTPUT_TOKENS);
    wait_until("the middle of the streams", WITHIN, || async {
        let page = get(rig, &format!("/admin/requests?limit={streams}"))
            .await
            .map_err(|error| format!("{error:#}"))?;
        let records = page["records"].as_array().cloned().unwrap_or_default();
        let (mut running, mut out) = (Running::default(), 0);
        for record in records.iter().filter(|record| record["seq"].as_u64() > Some(before)) {
            let tokens = record["output_tokens"].as_u64().unwrap_or(0);
            out += tokens;
            let node = record["decode_node"].as_str().unwrap_or_default();
            match (record["state"] == "ended", tokens) {
                (true, _) => running.ended += 1,
                (false, 0) => running.waiting += 1,
                (false, _) => *running.in_mid_stream.entry(node.to_owned()).or_default() += 1,
            }
        }
        let begun = running.ended + running.in_mid_stream.values().sum::<usize>();
        if begun == streams || out >= all / 2 {
            Ok(running)
        } else {
            Err(format!("{out} of {all}, {running:?}"))
        }
    })
    .await
}

/// Its number: the streams of a round come after it.
async fn last_record(rig: &Rig) -> Result<u64> {
    let page = get(rig, "/admin/requests?limit=1").await?;
    Ok(page["records"][0]["seq"].as_u64().unwrap_or(0))
}

/// Of the last so many requests those that were placed more than once.
async fn migrated(rig: &Rig, streams: usize) -> Result<BTreeSet<String>> {
    let page = get(rig, &format!("/admin/requests?limit={streams}")).await?;
    let records = page["records"].as_array().context("no records")?;
    let again = records.iter().filter(|record| record["attempts"].as_u64() > Some(1));
    Ok(again
        .filter_map(|record| record["id"].as_str())
        .map(str::to_owned)
        .collect())
}

/// The longest gap that ends after `moment` less the median of those; none for a stream that had ended before.
fn extra_gap(arrivals: &[Instant], moment: Instant) -> Option<Duration> {
    let after = arrivals.windows(2).filter(|pair| pair[1] > moment);
    let gaps: Vec<Duration> = after.map(|pair| pair[1] - pair[0]).collect();
    let longest = gaps.iter().max()?;
    Some(longest.saturating_sub(quantile(&gaps, 0.5)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extra_gap_is_the_longest_after_the_kill_less_the_usual_one() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let arrivals = [at(0), at(500), at(510), at(520), at(820), at(830), at(840)];
        assert_eq!(extra_gap(&arrivals, at(600)), Some(Duration::from_millis(290)));
        assert_eq!(extra_gap(&arrivals, at(900)), None);
    }
}
