//! The event log: one short JSON line for each step of a request, an attempt or a transfer on this process. The lines are
//! numbered. So a checker can read the logs of all processes after a run and find any step that was illegal, missing or
//! double.
//!
//! It is off unless `--event-log FILE` names a file. Several processes may append to one file: every line is one `write`.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};
use serving_core::cluster::{Change, Phase};
use serving_core::ids::{NodeEpoch, TransferId};
use serving_core::request::AttemptKey;
use thiserror::Error;

use crate::clock::Clock;

/// The kinds of steps. The names are the contract between processes and checker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Step {
    /// Coordinator: the request was admitted to the queue.
    Arrived,
    /// Coordinator: the request's phase changed.
    Phase { from: String, to: String },
    /// Coordinator: the request is over. No line about it follows.
    Ended,
    /// Decode node: blocks are reserved. `transfer` is set when a prefill node will fill them.
    Opened { transfer: Option<String> },
    /// Prefill node: the prompt's blocks are held.
    Accepted,
    /// Either node: it refused and holds nothing.
    Refused { reason: String },
    /// Prefill node: first tokens are drawn. `continues` is set when the decode node goes on from them.
    FirstTokens { continues: bool },
    /// Decode node: every byte is verified; the sequence may run.
    Committed { transfer: String },
    /// Decode node: no byte of the transfer will be written any more.
    TransferEnded { transfer: String, end: String },
    /// Prefill node: nothing reads the blocks for the push any more.
    PushEnded { end: String },
    /// Either node: the attempt has ended well there.
    Finished,
    /// Either node: the attempt has failed there.
    Failed { cause: String },
    /// Either node: the other end of the attempt's stream went away.
    Cancelled,
}

impl From<Change> for Step {
    fn from(change: Change) -> Self {
        let name = |phase: Phase| phase.name().to_owned();
        match change {
            Change::Arrived => Step::Arrived,
            Change::Phase { from, to } => Step::Phase {
                from: name(from),
                to: name(to),
            },
            Change::Ended => Step::Ended,
        }
    }
}

/// One line. `request_id` and `attempt` are absent where only the transfer is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    pub process: String,
    /// One life of the process.
    pub epoch: String,
    /// From 1, without gaps.
    pub seq: u64,
    /// The time on this process's own clock.
    pub t_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    #[serde(flatten)]
    pub step: Step,
}

#[derive(Debug, Error)]
#[error("cannot append to the event log {path}: {source}; name a file this process may write")]
pub struct EventLogError {
    path: String,
    source: std::io::Error,
}

#[derive(Debug)]
struct Open {
    file: File,
    process: String,
    epoch: String,
    seq: u64,
    has_failed: bool,
}

static LOG: OnceLock<Mutex<Open>> = OnceLock::new();

/// Opens the log of this process; later calls change nothing.
///
/// # Errors
/// [`EventLogError`].
pub fn open(path: &Path, process: &str) -> Result<(), EventLogError> {
    let error = |source| EventLogError {
        path: path.display().to_string(),
        source,
    };
    let file = File::options().create(true).append(true).open(path).map_err(error)?;
    let open = Open {
        file,
        process: process.to_owned(),
        epoch: NodeEpoch(rand::random()).to_string(),
        seq: 0,
        has_failed: false,
    };
    let _ = LOG.set(Mutex::new(open));
    Ok(())
}

/// Writes a step of one attempt. It costs nothing when the log is off.
pub fn record(key: AttemptKey, step: impl FnOnce() -> Step) {
    if let Some(log) = LOG.get() {
        write(log, (Some(key.request.to_string()), Some(key.attempt.0)), step());
    }
}

/// Writes a step of a transfer whose attempt may be over.
pub fn record_transfer(transfer: TransferId, step: impl FnOnce(String) -> Step) {
    if let Some(log) = LOG.get() {
        write(log, (None, None), step(transfer.to_string()));
    }
}

fn write(log: &Mutex<Open>, (request_id, attempt): (Option<String>, Option<u32>), step: Step) {
    let mut open = log.lock().unwrap_or_else(PoisonError::into_inner);
    open.seq += 1;
    let line = Line {
        process: open.process.clone(),
        epoch: open.epoch.clone(),
        seq: open.seq,
        t_us: Clock::now().0 / 1000,
        request_id,
        attempt,
        step,
    };
    let Ok(mut text) = serde_json::to_string(&line) else {
        return;
    };
    text.push('\n');
    // One write for each line: lines of several processes do not mix, and a killed process leaves whole lines.
    if let Err(error) = open.file.write_all(text.as_bytes())
        && !std::mem::replace(&mut open.has_failed, true)
    {
        tracing::warn!(%error, "the event log cannot be written; its checker will report a gap");
    }
}

#[cfg(test)]
mod tests {
    use serving_core::ids::{Attempt, RequestId};

    use super::*;

    #[test]
    fn lines_are_numbered_and_read_back_as_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events");
        let key = AttemptKey {
            request: RequestId(7),
            attempt: Attempt(1),
        };
        record(key, || unreachable!("the log is off"));
        open(&path, "decode-0").expect("it opens");
        record(key, || Step::Opened { transfer: None });
        record_transfer(TransferId(9), |transfer| Step::Committed { transfer });
        let text = std::fs::read_to_string(&path).expect("written");
        let lines: Vec<Line> = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("a line"))
            .collect();
        assert_eq!(lines.iter().map(|line| line.seq).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(lines[0].request_id, Some(RequestId(7).to_string()));
        assert_eq!(
            lines[1].step,
            Step::Committed {
                transfer: TransferId(9).to_string()
            }
        );
        assert!(text.starts_with(r#"{"process":"decode-0","epoch":""#), "{text}");
        let error = open(Path::new("/nowhere/at/all"), "x").expect_err("no such folder");
        assert!(error.to_string().contains("/nowhere/at/all"));
    }
}
