//! The errors of a local cluster, and what is known of a process that ended.

use std::process::ExitStatus;
use std::time::Duration;

use thiserror::Error;

use super::kind::ProcessKind;
use super::membership::LocalMembership;

#[derive(Debug, Error)]
pub enum LocalClusterError {
    #[error("{0}")]
    Exited(NodeExit),
    #[error("not ready within {within:?}: {waiting_for}")]
    NotReady { within: Duration, waiting_for: String },
    #[error("no node is called `{name}`; there are {names}")]
    NoSuchNode { name: String, names: String },
    #[error("cannot start: {0:#}")]
    Start(anyhow::Error),
    #[error(
        "{membership} did not answer within {within:?} ({why}): start that etcd or correct --membership; `--membership etcd` starts one, and `--membership embedded` needs none"
    )]
    NoEtcd {
        membership: LocalMembership,
        within: Duration,
        why: String,
    },
}

/// A process that ended when nobody had asked it to.
#[derive(Clone, Debug, Error)]
#[error("{name} (pid {pid}) ended with {status}{}", last_lines_text(.last_lines))]
pub struct NodeExit {
    pub name: String,
    pub kind: ProcessKind,
    pub pid: u32,
    /// The exit status or the signal, from the operating system.
    pub status: ExitStatus,
    /// It had not ended by itself, so the launcher killed it.
    pub is_killed: bool,
    /// The last lines of its stderr.
    pub last_lines: Vec<String>,
}

impl NodeExit {
    /// Whether a node ended as it does after a drain. Without its coordinator the cluster has ended.
    pub fn has_left(&self) -> bool {
        self.status.code() == Some(0) && self.kind != ProcessKind::Coordinator
    }
}

fn last_lines_text(lines: &[String]) -> String {
    if lines.is_empty() {
        return "; it said nothing on stderr".to_owned();
    }
    format!("; its last lines:\n    {}", lines.join("\n    "))
}
