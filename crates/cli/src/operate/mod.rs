//! The verbs that change a live cluster. They ask a coordinator, which asks the node; then they watch it until it is done.

pub mod drain;
pub mod role;

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use tokio::time::Instant;

use crate::observe::client::AdminClient;
use crate::observe::cluster::Cluster;
use crate::terminal::say;

/// The one thing that an order must say twice.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct ForceArgs {
    /// Also when no node that decodes is left: then running requests may fail, and new ones are refused.
    #[arg(long)]
    pub force: bool,
}

impl ForceArgs {
    fn query(self) -> Vec<(&'static str, String)> {
        self.force.then(|| ("force", true.to_string())).into_iter().collect()
    }
}

/// How often the cluster is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What a look at the cluster says of an order.
enum Look {
    /// Done, in words.
    Done(String),
    /// How far it is.
    Going(String),
}

/// Looks until the order is done, and tells each step; `what` is what did not happen when `wait_s` is over.
async fn watch(
    client: &AdminClient,
    (what, wait_s): (&str, u64),
    look: impl Fn(&Cluster) -> anyhow::Result<Look>,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(wait_s);
    let mut shown = String::new();
    loop {
        let cluster: Cluster = client.read(&["admin", "cluster"], &[]).await?;
        match look(&cluster)? {
            Look::Done(words) => {
                say!("{words}");
                return Ok(());
            }
            Look::Going(now) if now != shown => {
                say!("  {now}");
                shown = now;
            }
            Look::Going(_) => {}
        }
        if Instant::now() >= deadline {
            bail!("{what} within {wait_s} s ({shown}); it goes on, look again with `baton nodes`");
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
