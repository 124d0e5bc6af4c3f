//! What the requests of a load came to, each compared with its fault-free answer, and what is left of them on the nodes.

use std::time::Duration;

use super::load::{Ended, Sent};
use crate::fault_matrix::client::Terminal;
use crate::fault_matrix::rig::Rig;
use crate::fault_matrix::strike::REST_WITHIN;
use crate::fault_matrix::verdict::{Connection, Outcome, judge};
use crate::token_exact::Answer;

/// Waits until no node holds a block; one that does is a broken promise, and what was measured until then is not lost.
pub async fn rest(rig: &Rig, violations: &mut Vec<String>) -> Duration {
    match rig.wait_for_rest(REST_WITHIN).await {
        Ok(to_rest) => to_rest,
        Err(error) => {
            violations.push(format!("{error:#}"));
            REST_WITHIN
        }
    }
}

/// What a load's requests came to.
#[derive(Clone, Debug, Default)]
pub struct Judged {
    pub sent: usize,
    pub held_back: usize,
    pub completed: usize,
    /// Codes of the explicit errors.
    pub failed: Vec<String>,
    pub connection_lost: usize,
    /// Requests that were sent again before their answer began.
    pub reconnected: usize,
    pub violations: Vec<String>,
}

impl Judged {
    pub fn summary(&self) -> String {
        let (sent, completed, failed) = (self.sent, self.completed, &self.failed);
        let (lost, again, share) = (self.connection_lost, self.reconnected, 100.0 * self.success_share());
        format!(
            "{sent} requests: {completed} completed ({share:.2} %), {} errors {failed:?}, {lost} connections lost, {again} sent again before an answer began, {} left late",
            failed.len(),
            self.held_back
        )
    }

    pub fn success_share(&self) -> f64 {
        self.completed as f64 / self.sent.max(1) as f64
    }
}

/// Compares every answer with the fault-free one.
pub fn judge_all(ended: &Ended, answers: &[Answer], connection: impl Fn(&Sent) -> Connection) -> Judged {
    let sent = &ended.sent;
    let mut judged = Judged {
        sent: sent.len(),
        held_back: ended.held_back,
        reconnected: sent.iter().filter(|sent| sent.seen.reconnects > 0).count(),
        ..Judged::default()
    };
    for one in sent {
        match judge(connection(one), &one.seen, &answers[one.which]) {
            Ok(Outcome::Completed) => judged.completed += 1,
            Ok(Outcome::Failed) => judged
                .failed
                .extend(one.seen.terminals.iter().map(|terminal| match terminal {
                    Terminal::Error(what) | Terminal::Finished(what) => what.clone(),
                })),
            Ok(Outcome::ConnectionLost) => judged.connection_lost += 1,
            Ok(Outcome::Left) => judged.violations.push("nobody was to leave".to_owned()),
            Err(what) => judged
                .violations
                .push(format!("request {:?}: {what}", one.seen.request_id)),
        }
    }
    judged
}
