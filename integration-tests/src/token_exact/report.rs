//! Runs the cases on one configuration after the other, the first being the baseline, and tells what each row showed.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Answer, Baseline, Case, Differences, Prompts, cases, compare, timed_run, tokenize};
use crate::PROSE;
use crate::cluster::{TestCluster, options};
use crate::configurations::Configuration;

/// The prompts and seeds of every run: the same for everybody who repeats it.
const CASE_SEED: u64 = 20_261_121;
/// A full queue of long prompts on two slow cores; refusals would only make the comparison smaller.
const QUEUE_WAIT_MS_MAX: u64 = 600_000;

pub const HEADER: &str = "| configuration | requests | tokens compared | differing | KV blocks compared | differing | incomplete answers | committed handoffs | local prefills | seconds |\n|---|---|---|---|---|---|---|---|---|---|";

/// What one configuration showed against the baseline.
#[derive(Clone, Debug)]
pub struct Row {
    pub configuration: Configuration,
    pub differences: Differences,
    /// By the coordinator's counters; handoffs over the configuration's own transport.
    pub committed_handoffs: u64,
    pub local_prefills: u64,
    pub took: Duration,
}

impl Row {
    /// Nothing differs, and every request went the way its topology promises.
    pub fn is_good(&self) -> bool {
        let requests = self.differences.requests as u64;
        let went_its_way = match self.configuration.has_prefill_pool() {
            true => self.committed_handoffs == requests && self.local_prefills == 0,
            false => self.committed_handoffs == 0 && self.local_prefills == requests,
        };
        self.differences.is_exact() && went_its_way
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = &self.differences;
        write!(
            f,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {:.0} |",
            self.configuration,
            d.requests,
            d.tokens_compared,
            d.tokens_differing,
            d.blocks_compared,
            d.blocks_differing,
            d.incomplete,
            self.committed_handoffs,
            self.local_prefills,
            self.took.as_secs_f64()
        )
    }
}

/// The first configuration is the baseline and is compared with itself: its row shows its counters and its time.
pub async fn run(configurations: &[Configuration], prompts: Prompts) -> Result<Vec<Row>> {
    let mut baseline: Option<(Vec<Case>, Vec<Answer>)> = None;
    // The first answers with each block size.
    let mut by_block_tokens: BTreeMap<u32, Vec<Answer>> = BTreeMap::new();
    let mut rows = Vec::new();
    for configuration in configurations {
        let cluster = start(configuration).await.with_context(|| configuration.to_string())?;
        let url = cluster.cluster.base_url();
        let all = match &baseline {
            Some((cases, _)) => cases.clone(),
            None => cases(&tokenize(&cluster.http, url, PROSE).await?, prompts, CASE_SEED),
        };
        let (answers, took) = timed_run(url, &all).await.with_context(|| configuration.to_string())?;
        let metrics = cluster.metrics().await?;
        let sum = |name: &str, labels: &[(&str, &str)]| metrics.sum(name, labels).unwrap_or(0.0) as u64;
        let (cases, reference) = baseline.get_or_insert_with(|| (all, answers.clone()));
        let same_blocks = by_block_tokens
            .entry(configuration.block_tokens)
            .or_insert_with(|| answers.clone());
        let reference = Baseline {
            tokens: reference,
            kv_hashes: same_blocks,
            block_tokens: configuration.block_tokens as usize,
        };
        let row = Row {
            configuration: *configuration,
            differences: compare(cases, reference, &answers),
            committed_handoffs: sum(
                "baton_handoffs_total",
                &[("outcome", "committed"), ("transport", configuration.transport)],
            ),
            local_prefills: sum("baton_local_prefills_total", &[]),
            took,
        };
        println!("{row}");
        rows.push(row);
        cluster.stop().await.with_context(|| configuration.to_string())?;
    }
    Ok(rows)
}

async fn start(configuration: &Configuration) -> Result<TestCluster> {
    let mut options = options(configuration.topology)?;
    options.settings.threads_per_node = Some(configuration.threads);
    options.settings.max_num_batched_tokens = Some(configuration.chunk_tokens);
    options.settings.block_size = Some(configuration.block_tokens);
    options.settings.prefix_cache = Some(configuration.prefix_cache);
    options.settings.speculative_tokens = Some(configuration.speculative_tokens);
    options.settings.kernel = Some(configuration.kernel.to_owned());
    // `shm` is the staged mode: without the secret that `up` draws nobody writes in place.
    let kind = configuration.transport.trim_end_matches("-direct");
    if kind == configuration.transport {
        let no_secret = ("BATON_SHM_DIRECT_SECRET".to_owned(), String::new());
        options.environment.push(no_secret);
    }
    let transports = format!("--transports={kind}");
    options.prefill_flags.push(transports.clone().into());
    options.decode_flags.push(transports.into());
    options
        .coordinator_flags
        .push(format!("--queue-wait-ms-max={QUEUE_WAIT_MS_MAX}").into());
    options
        .coordinator_flags
        .push(format!("--request-time-limit-ms={QUEUE_WAIT_MS_MAX}").into());
    TestCluster::start_with(options).await
}
