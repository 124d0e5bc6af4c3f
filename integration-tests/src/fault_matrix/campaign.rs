//! Many cells, one after another: the baseline first, a cluster for as long as it lasts, the event log at its end.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::cells::{Cell, Victim};
use super::nodes::Nodes;
use super::rig::{Rig, RigOptions};
use super::strike::{CellReport, REQUESTS_PER_CELL, Workload, strike};
use crate::cluster::TestCluster;
use crate::token_exact::{self, Answer, Case, OUTPUT_TOKENS, tokenize};

/// Prompts of a campaign: so many that one comes again only after the small pools have forgotten it.
const PROMPTS_MAX: usize = 96;
/// On GPUs two pools of 64 blocks have forgotten a prompt of 7 blocks by then.
const PROMPTS_ON_GPUS_MAX: usize = 32;
/// Two to four chunks of the rig's 128 tokens. Prompts and chunks are shorter on GPUs.
const PROMPT_TOKENS: Range<usize> = 200..420;
/// A cluster is made anew after so many cells, so that what a long life hides is looked at, too.
const CELLS_PER_CLUSTER: usize = 25;

/// Where a request goes is the cluster's choice: now and then fewer pass a point on one node than were to pass it first.
const TRIES: usize = 4;

/// What a campaign found.
#[derive(Clone, Debug, Default)]
pub struct Campaign {
    pub reports: Vec<CellReport>,
    /// Of the event logs: illegal, missing or double steps.
    pub log_violations: Vec<String>,
    pub log_lines: usize,
    pub commits: usize,
    /// The commits by transport, as far as coordinators told: one that is killed in a cell takes what it knew of that cell with it.
    pub handoffs: BTreeMap<String, u64>,
}

impl Campaign {
    pub fn violations(&self) -> Vec<String> {
        let cells = self.reports.iter();
        let of_cells = cells.flat_map(|report| report.violations.iter().map(|what| format!("{}: {what}", report.cell)));
        of_cells.chain(self.log_violations.iter().cloned()).collect()
    }
}

/// The same prompts on one co-located node of that kind without any fault.
///
/// # Errors
/// The cluster does not start or does not answer.
pub async fn baseline(nodes: Nodes, prompts: usize, seed: u64) -> Result<(Vec<Case>, Vec<Answer>)> {
    let most = match nodes.gpu {
        None => PROMPTS_MAX,
        Some(_) => PROMPTS_ON_GPUS_MAX,
    };
    baseline_of(nodes, prompts.min(most), nodes.prompt_tokens(PROMPT_TOKENS), seed).await
}

/// The same with prompts of other lengths.
///
/// # Errors
/// As [`baseline`].
pub async fn baseline_of(
    nodes: Nodes,
    prompts: usize,
    tokens: Range<usize>,
    seed: u64,
) -> Result<(Vec<Case>, Vec<Answer>)> {
    baseline_of_length(nodes, prompts, tokens, (nodes.output_tokens(), seed)).await
}

/// The same with answers of another length.
///
/// # Errors
/// As [`baseline`].
pub async fn baseline_of_length(
    nodes: Nodes,
    prompts: usize,
    tokens: Range<usize>,
    (output_tokens, seed): (u32, u64),
) -> Result<(Vec<Case>, Vec<Answer>)> {
    let folder = tempfile::tempdir()?;
    let cluster = TestCluster::start_with(nodes.options("1c", folder.path())?).await?;
    let text = tokenize(&cluster.http, cluster.cluster.base_url(), nodes.prose()).await?;
    let with_length = |case: Case| Case { output_tokens, ..case };
    let cases: Vec<Case> = cases_of(&text, prompts, tokens, seed)
        .into_iter()
        .map(with_length)
        .collect();
    let answers = token_exact::run(cluster.cluster.base_url(), &cases).await?;
    let processes = cluster.cluster.processes().into_iter();
    let in_order: BTreeMap<String, u32> = processes
        .filter(|process| process.role != "coordinator")
        .map(|process| (process.name, process.pid))
        .collect();
    cluster.stop().await?;
    let wrong = nodes.wrong_on_gpus(folder.path(), &in_order)?;
    ensure!(wrong.is_empty(), "without any fault: {wrong:?}");
    Ok((cases, answers))
}

/// Half greedy, half sampled; none begins like another.
pub fn cases(text: &[u32], count: usize, seed: u64) -> Vec<Case> {
    cases_of(text, count, PROMPT_TOKENS, seed)
}

fn cases_of(text: &[u32], count: usize, tokens: Range<usize>, seed: u64) -> Vec<Case> {
    let mut random = StdRng::seed_from_u64(seed);
    let stride = text.len().saturating_sub(tokens.end) / count.max(1);
    let case = |i: usize| {
        let length = random.random_range(tokens.clone());
        let start = i * stride + random.random_range(0..stride.max(1));
        let is_greedy = i.is_multiple_of(2);
        Case {
            prompt: text[start..start + length].to_vec(),
            output_tokens: OUTPUT_TOKENS,
            temperature: if is_greedy { 0.0 } else { 0.8 },
            top_p: if is_greedy { 1.0 } else { 0.95 },
            seed: random.random(),
            // Of the greedy ones and of the sampled ones.
            is_constrained: i % 4 >= 2,
        }
    };
    (0..count).map(case).collect()
}

/// Runs the cells in order, telling each report to `told`.
///
/// # Errors
/// A rig that cannot be made or healed; the reports so far are lost, `told` has heard them.
pub async fn run(cells: &[Cell], options: &RigOptions, told: impl Fn(&CellReport)) -> Result<Campaign> {
    let (cases, answers) = baseline(options.nodes, cells.len() * REQUESTS_PER_CELL, options.seed).await?;
    let mut random = StdRng::seed_from_u64(options.seed);
    let mut campaign = Campaign::default();
    let mut rig: Option<(Rig, usize)> = None;
    for (i, cell) in cells.iter().enumerate() {
        let has_etcd = cell.victim == Victim::Etcd;
        let (mut current, age) = match rig.take() {
            Some(rig) if rig.0.etcd().is_ok() == has_etcd => rig,
            other => {
                if let Some((current, _)) = other {
                    campaign.close(current).await?;
                }
                let options = RigOptions {
                    has_etcd,
                    ..options.clone()
                };
                (Rig::start(&options).await?, 0)
            }
        };
        let from = i * REQUESTS_PER_CELL;
        let index = |k: usize| (from + k) % cases.len();
        let of_cell: Vec<Case> = (0..REQUESTS_PER_CELL).map(|k| cases[index(k)].clone()).collect();
        let expected: Vec<Answer> = (0..REQUESTS_PER_CELL).map(|k| answers[index(k)].clone()).collect();
        let work = Workload {
            cases: &of_cell,
            baseline: &expected,
            is_probed: options.is_probed,
        };
        let mut report = strike(&mut current, *cell, work, &mut random).await;
        for _ in 1..TRIES {
            if report.as_ref().is_ok_and(|report| report.is_missed) {
                report = strike(&mut current, *cell, work, &mut random).await;
            }
        }
        let mut report = report.with_context(|| cell.to_string())?;
        if report.is_missed {
            report.violations.push("the point was not reached".to_owned());
        }
        told(&report);
        let is_spent = !current.has_coordinator() || age + 1 >= CELLS_PER_CLUSTER || !report.violations.is_empty();
        campaign.reports.push(report);
        if is_spent {
            campaign.close(current).await?;
        } else {
            rig = Some((current, age + 1));
        }
    }
    if let Some((current, _)) = rig {
        campaign.close(current).await?;
    }
    Ok(campaign)
}

impl Campaign {
    async fn close(&mut self, rig: Rig) -> Result<()> {
        for (transport, count) in rig.handoffs().await? {
            *self.handoffs.entry(transport).or_default() += count;
        }
        let findings = rig.stop().await?;
        self.log_lines += findings.lines;
        self.commits += findings.commits;
        self.log_violations.extend(findings.violations);
        Ok(())
    }
}
