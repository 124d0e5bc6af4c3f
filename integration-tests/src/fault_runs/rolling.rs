//! T20: every process is asked to go in turn, under load and beside a client that does not read, and started again.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};

use super::judged::{Judged, judge_all, rest};
use super::load::{self, Load, Rates, Terms};
use super::quantile;
use crate::MODEL;
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::fault_matrix::verdict::Connection;

/// After its grace a process cuts what is left and says goodbye.
pub const BEYOND_GRACE: Duration = Duration::from_secs(1);
/// One that is not gone by then does not go by itself.
const GONE_WITHIN: Duration = Duration::from_secs(60);
/// Longer than any drain: this answer never ends by itself before the grace does.
const STUCK_TOKENS: u32 = 1900;
/// The kernel keeps little of what is not read.
const STUCK_WINDOW_BYTES: u32 = 4096;

/// What a run is made of.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub rounds: usize,
    /// Of each role; the coordinator comes last.
    pub nodes_each: usize,
    pub grace: Duration,
    pub terms: Terms,
}

/// One process that was asked to go.
#[derive(Clone, Debug)]
pub struct Drain {
    pub name: String,
    pub took: Duration,
    pub exit_code: Option<i32>,
}

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Rolling {
    pub rates: Rates,
    pub grace: Duration,
    pub drains: Vec<Drain>,
    pub judged: Judged,
    pub violations: Vec<String>,
}

impl Rolling {
    pub fn summary(&self) -> String {
        let mut text = format!(
            "{:.1} requests/s offered; {}\n",
            self.rates.offered,
            self.judged.summary()
        );
        for role in ["prefill", "decode", "coordinator"] {
            let of_role = self.drains.iter().filter(|drain| drain.name.starts_with(role));
            let took: Vec<Duration> = of_role.map(|drain| drain.took).collect();
            let (n, p50, max) = (took.len(), quantile(&took, 0.5), quantile(&took, 1.0));
            let _ = writeln!(text, "{role}: {n} drains, p50 {p50:.2?}, max {max:.2?}");
        }
        text
    }

    /// What was promised and did not hold.
    pub fn broken(&self) -> Vec<String> {
        let mut broken = self.violations.clone();
        let late = self
            .drains
            .iter()
            .filter(|drain| drain.took > self.grace + BEYOND_GRACE);
        broken.extend(late.map(|drain| {
            format!(
                "{} took {:?} to go, its grace is {:?}",
                drain.name, drain.took, self.grace
            )
        }));
        if !self.judged.failed.is_empty() {
            broken.push(format!("requests ended by an error: {:?}", self.judged.failed));
        }
        broken
    }
}

/// # Errors
/// The rig broke, or a process did not go at all.
pub async fn run(plan: Plan) -> Result<Rolling> {
    let options = RigOptions {
        drain_ms_max: u64::try_from(plan.grace.as_millis()).ok(),
        ..load::rig_options(plan.terms)
    };
    let (cases, answers) = load::baseline(plan.terms).await?;
    let mut rig = Rig::start(&options).await?;
    let mut run = Rolling::default();
    let (load, rates) = Load::start(&rig, &cases, plan.terms).await;
    run.rates = rates;
    run.grace = plan.grace;
    let of_role = |role: &&str| rig.names(role).into_iter().take(plan.nodes_each);
    let mut names: Vec<String> = ["prefill", "decode"].iter().flat_map(of_role).collect();
    names.extend(rig.names("coordinator"));
    for name in names.iter().cycle().take(names.len() * plan.rounds) {
        let stuck = stuck_client(&rig).await?;
        tokio::time::sleep(plan.terms.calm).await;
        let (took, exit_code) = rig.terminate(name, GONE_WITHIN).await?;
        rig.restart(name).await?;
        rig.wait_until_whole().await?;
        drop(stuck);
        run.drains.push(Drain {
            name: name.clone(),
            took,
            exit_code,
        });
    }
    load.wait_for_those_before(Instant::now()).await?;
    let ended = load.stop().await?;
    rest(&rig, &mut run.violations).await;
    run.judged = judge_all(&ended, &answers, |_| Connection::Holds);
    run.violations.append(&mut run.judged.violations);
    for Drain { name, exit_code, .. } in &run.drains {
        if *exit_code != Some(0) {
            run.violations.push(format!("{name} ended with {exit_code:?}"));
        }
    }
    run.violations.extend(rig.wrong_sums());
    run.violations.extend(rig.stop().await?.violations);
    Ok(run)
}

/// Asks for a long answer with much in each event, and never reads a byte of it.
async fn stuck_client(rig: &Rig) -> Result<TcpStream> {
    let host = rig.base_url().trim_start_matches("http://").to_owned();
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(STUCK_WINDOW_BYTES)?;
    let mut stream = socket.connect(host.parse()?).await?;
    let body = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": STUCK_TOKENS,
        "temperature": 0, "ignore_eos": true, "stream": true, "logprobs": true, "top_logprobs": 20,
    })
    .to_string();
    let length = body.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    Ok(stream)
}
