//! T9: a client leaves at an exact point; how long until nobody computes for it, and until its blocks are free.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use service_runtime::failpoints::FaultPoint;
use tokio::sync::oneshot;

use crate::fault_matrix::client::{self, Ending, Manner};
use crate::fault_matrix::nodes::Nodes;
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::scrape::Scrape;
use crate::token_exact::{Case, tokenize};
use crate::wait::wait_until;

/// 64 chunks of 16 tokens. On GPUs the chunk is the same, because a step of fewer tokens takes no less time there, and the prompt
/// has a part of the chunks.
const CHUNK_TOKENS: u32 = 16;
const PROMPT_TOKENS: u32 = 64 * CHUNK_TOKENS;
/// So many steps before its last one an answer is in its middle at the latest.
const LAST_STEPS: u32 = 4;
const REACHED_WITHIN: Duration = Duration::from_secs(60);
const FREE_WITHIN: Duration = Duration::from_secs(20);
/// Steps that still run have ended by then, and the count of them is final.
const SETTLE: Duration = Duration::from_millis(150);
const LOOK_EVERY: Duration = Duration::from_millis(3);

/// One cancel.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub point: FaultPoint,
    /// From the moment that the client is gone and every process runs, to the end of the last step of any engine.
    pub to_compute_stop: Duration,
    pub to_blocks_free: Duration,
}

/// What a run of cancels measured.
#[derive(Clone, Debug, Default)]
pub struct Cancels {
    pub samples: Vec<Sample>,
    /// Mean time of a chunk on the prefill node, over the run.
    pub chunk: Duration,
    /// Committed handoffs by transport.
    pub handoffs: BTreeMap<String, u64>,
}

/// `rounds` cancels at each of F1 to F11, one request at a time, on one prefill and one decode node.
///
/// # Errors
/// The rig broke, a point was not reached, or blocks were not free within 20 s.
pub async fn run(rounds: usize, nodes: Nodes, seed: u64) -> Result<Cancels> {
    let options = RigOptions {
        chunk_tokens: CHUNK_TOKENS,
        prefix_cache: false,
        ..RigOptions::of(nodes, "1p1d", seed)
    };
    let (prompt_tokens, output_tokens) = (nodes.tokens(PROMPT_TOKENS), nodes.output_tokens());
    let length = prompt_tokens as usize;
    let rig = Rig::start(&options).await?;
    let text = tokenize(&rig.cluster.http, rig.base_url(), nodes.prose()).await?;
    let mut random = StdRng::seed_from_u64(seed);
    let mut cancels = Cancels::default();
    for point in FaultPoint::ALL
        .into_iter()
        .filter(|point| *point != FaultPoint::TerminalSent)
    {
        for _ in 0..rounds {
            let start = random.random_range(0..text.len() - length);
            let case = Case {
                prompt: text[start..start + length].to_vec(),
                output_tokens,
                temperature: 0.0,
                top_p: 1.0,
                seed: 1,
                is_constrained: false,
            };
            let passages = match point {
                FaultPoint::MidChunk => random.random_range(0..prompt_tokens / CHUNK_TOKENS - 1),
                FaultPoint::MidDecode => random.random_range(0..output_tokens - LAST_STEPS),
                _ => 0,
            };
            let sample = cancel(&rig, &case, (point, passages)).await;
            cancels.samples.push(sample.with_context(|| point.name())?);
        }
    }
    cancels.chunk = chunk_time(&rig).await?;
    cancels.handoffs = rig.handoffs().await?;
    let findings = rig.stop().await?;
    anyhow::ensure!(findings.violations.is_empty(), "{:?}", findings.violations);
    Ok(cancels)
}

async fn cancel(rig: &Rig, case: &Case, (point, passages): (FaultPoint, u32)) -> Result<Sample> {
    let name = rig.names(point.role()).first().cloned().context("a process")?;
    let actions = format!("{passages}*off->1*return(stop)");
    anyhow::ensure!(rig.arm(&name, (point, &actions)).await, "{name} cannot be armed");
    let (leave, left) = oneshot::channel();
    let manner = Manner {
        leave: left,
        ..Manner::staying(REACHED_WITHIN)
    };
    let (client, url, case) = (rig.cluster.http.clone(), rig.base_url().to_owned(), case.clone());
    let request = tokio::spawn(async move { client::stream(&client, &url, &case, manner).await });
    wait_until("the point", REACHED_WITHIN, || async {
        match rig.is_paused(&name) {
            true => Ok(()),
            false => Err("not yet"),
        }
    })
    .await?;
    let _ = leave.send(());
    let seen = request.await?;
    anyhow::ensure!(
        seen.ending == Some(Ending::Left),
        "the request ended by itself: {seen:?}"
    );
    rig.resume(&name);
    let sample = watch(rig, point).await;
    rig.arm(&name, (point, "off")).await;
    sample
}

/// Looks at step counts and blocks until nothing is held, and a little longer.
async fn watch(rig: &Rig, point: FaultPoint) -> Result<Sample> {
    let gone = Instant::now();
    let mut looks: Vec<(Duration, f64)> = Vec::new();
    let (mut to_blocks_free, settle) = (None, rig.nodes().patience(SETTLE));
    while to_blocks_free.is_none_or(|free| gone.elapsed() < free + settle) {
        let steps = steps(rig).await?;
        looks.push((gone.elapsed(), steps));
        if to_blocks_free.is_none() && rig.is_at_rest().await.is_ok() {
            to_blocks_free = Some(gone.elapsed());
        }
        anyhow::ensure!(gone.elapsed() < FREE_WITHIN, "not free: {:?}", rig.is_at_rest().await);
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let last = looks.last().map_or(0.0, |(_, steps)| *steps);
    let stopped = looks.iter().find(|(_, steps)| *steps == last);
    Ok(Sample {
        point,
        to_compute_stop: stopped.map_or(Duration::ZERO, |(at, _)| *at),
        to_blocks_free: to_blocks_free.unwrap_or_default(),
    })
}

/// Engine steps of all nodes since their start.
async fn steps(rig: &Rig) -> Result<f64> {
    let mut total = 0.0;
    for name in ["prefill-0", "decode-0"] {
        let scrape: Scrape = rig.cluster.node_metrics(name).await?;
        total += scrape
            .sum("baton_batch_tokens_count", &[])
            .context("no count of steps")?;
    }
    Ok(total)
}

async fn chunk_time(rig: &Rig) -> Result<Duration> {
    let scrape = rig.cluster.node_metrics("prefill-0").await?;
    let of = |name| scrape.sum(name, &[]).with_context(|| format!("no {name}"));
    let seconds = of("baton_step_seconds_sum")? / of("baton_step_seconds_count")?.max(1.0);
    Ok(Duration::from_secs_f64(seconds))
}
