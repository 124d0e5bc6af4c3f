//! `baton bench run`: sends load to any OpenAI-compatible server and records when each token came.
//!
//! `plan.rs` is what it is told, `session.rs` carries it out, `exchange.rs` is one request, `answer.rs` reads its stream.

mod answer;
mod args;
mod assemble;
mod bodies;
mod connections;
mod csv_file;
pub(crate) mod environment;
mod exchange;
mod metrics;
pub mod plan;
pub(crate) mod processes;
mod result_json;
mod schedule;
mod screen;
pub mod scripted_server;
pub(crate) mod server_records;
mod session;
mod target;
mod timer;
pub(crate) mod traffic;
mod verb;

pub(crate) use args::RunArgs;
pub(crate) use verb::verb;

use std::time::Duration;

use anyhow::ensure;
use service_runtime::descriptors;
use workload::record::Run;

use crate::exit::{Exit, WithExit as _};
use assemble::{CLIENT, RunWithTexts};
use connections::Connections;
use plan::{LoadPlan, Observer, Pace};
use processes::Processes;
use session::Session;

/// A prompt is made in memory. No model has a context of this size.
const PROMPT_TOKENS_MAX: u32 = 1 << 22;
/// Descriptors of the process that are no connections of its load.
const OTHER_DESCRIPTORS: u32 = 64;
/// A hundred years, as for made arrivals. The clock cannot hold every `Duration`.
const DUE_MAX: Duration = Duration::from_secs(100 * 366 * 86_400);

/// Sends the load and waits for its answers. Call it on a current-thread runtime: then one thread sends and receives
/// everything, and the client's CPU is that of one core at most.
///
/// # Errors
/// The server cannot be reached or names no model, or the plan cannot be carried out. A request that fails is no error: it
/// is a record.
pub async fn run(plan: &LoadPlan, observer: Observer<'_>) -> anyhow::Result<Run> {
    Ok(run_with_texts(plan, observer).await?.run)
}

/// The same, with the text of each answer.
async fn run_with_texts(plan: &LoadPlan, observer: Observer<'_>) -> anyhow::Result<RunWithTexts> {
    check(plan).exit(Exit::Usage)?;
    // Each running request has a connection.
    descriptors::make_room(
        u32::try_from(plan.trace.requests.len())
            .unwrap_or(u32::MAX)
            .saturating_add(OTHER_DESCRIPTORS),
    );
    let target = target::find(&plan.server).await?;
    let connections = Connections::open(&plan.server).await?;
    let mut pids = match plan.server.pids.is_empty() {
        true => target.address.map(processes::of_listener).unwrap_or_default(),
        false => plan.server.pids.clone(),
    };
    pids.insert(CLIENT.to_owned(), std::process::id());
    let mut environment = environment::machine();
    environment.extend(environment::of_plan(plan, &target));
    environment.insert("processes".to_owned(), serde_json::json!(pids));
    let session = Session::new(plan, &target.model, connections)?;
    let outcomes = session.run(Processes::new(pids), observer).await?;
    let mut done = assemble::assemble(plan, outcomes, environment);
    if plan.reads_server_records {
        server_records::add(&plan.server, &mut done.run.records).await;
    }
    Ok(done)
}

fn check(plan: &LoadPlan) -> anyhow::Result<()> {
    ensure!(!plan.trace.requests.is_empty(), "the trace has no requests");
    ensure!(
        (0.0..=1.0).contains(&plan.cancel_rate),
        "the cancel rate is a share of the requests, 0 to 1"
    );
    let limit = match plan.pace {
        Pace::Open { max_concurrency } => max_concurrency,
        Pace::Closed { users } => Some(users),
    };
    ensure!(limit != Some(0), "with a concurrency of 0 nothing can be sent");
    ensure!(plan.request_timeout > Duration::ZERO, "the request timeout is 0");
    ensure!(
        plan.trace.requests.iter().all(|request| request.at <= DUE_MAX),
        "a request of the trace is due after more than 100 years"
    );
    let longest = plan.trace.requests.iter().map(|request| request.prompt_tokens).max();
    ensure!(
        longest.unwrap_or(0) <= PROMPT_TOKENS_MAX,
        "a prompt of the trace has {} tokens, more than {PROMPT_TOKENS_MAX}; scale the lengths",
        longest.unwrap_or(0)
    );
    Ok(())
}

#[cfg(test)]
mod tests;
