//! The verbs that change a live cluster. They ask a coordinator, which asks the node. Then they watch until the order is
//! done.

pub mod drain;
pub mod role;

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use coordinator::records::pages::ClusterPage;
use tokio::time::Instant;

use crate::observe::client::AdminClient;
use crate::terminal::say;

/// The flag for an order that would otherwise be refused.
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

/// The longest `--wait`: a day. A point in time that is too far away for a clock is a panic.
const WAIT_S_MAX: u64 = 24 * 60 * 60;
/// How often the state of the cluster is read.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The progress of an order, from one page of the cluster.
enum Look {
    /// Done, in words.
    Done(String),
    /// The progress, in words.
    Going(String),
}

/// Reads the state until the order is done, and prints each step. `what` names what did not happen when `wait_s` is over.
async fn watch(
    client: &AdminClient,
    (what, wait_s): (&str, u64),
    look: impl Fn(&ClusterPage) -> anyhow::Result<Look>,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(wait_s);
    let mut shown = String::new();
    loop {
        let cluster: ClusterPage = client.read(&["admin", "cluster"], &[]).await?;
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
