//! `baton bench run`: sends load to any OpenAI-compatible server and records when each token came.

pub mod plan;

use workload::record::Run;

use plan::{LoadPlan, Observer};

/// Sends the load and waits for its answers. It must be called on a current-thread runtime: one thread sends and receives
/// everything, so that its CPU can be shown beside the server's.
///
/// # Errors
/// The server cannot be reached or knows no model, or the plan cannot be carried out. A request that fails is no error: it
/// is a record.
pub async fn run(plan: &LoadPlan, observer: Observer<'_>) -> anyhow::Result<Run> {
    let _ = (plan, observer);
    anyhow::bail!("the load client is being built on branch w-load")
}
