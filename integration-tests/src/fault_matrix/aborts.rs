//! T26: how long after a node's death the living nodes end what they had under way with it, by the event log.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use service_runtime::event_log::{Line, Step};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::task::JoinHandle;

/// T26's line for nodes on GPUs: the longest deadline of their transports, which is that of a communicator that is made (15 s,
/// `crates/kv-transfer/src/device/mod.rs`), and a second.
pub(super) const ABORTED_WITHIN: Duration = Duration::from_secs(16);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Follows the log from a moment before the death on.
#[derive(Debug)]
pub(super) struct AbortWatch {
    victim: String,
    begun: Instant,
    before: Vec<Line>,
    stop: oneshot::Sender<()>,
    following: JoinHandle<Result<Vec<(Instant, Line)>>>,
}

impl AbortWatch {
    /// Call it at once before the victim is killed.
    ///
    /// # Errors
    /// There is no log, or a line of it is no event.
    pub fn start(log: &Path, victim: &str) -> Result<Self> {
        let file = File::open(log).with_context(|| format!("no event log at {}", log.display()))?;
        let mut log = Log { file, rest: Vec::new() };
        let before = log.new_lines()?;
        let (stop, stopped) = oneshot::channel();
        Ok(Self {
            victim: victim.to_owned(),
            begun: Instant::now(),
            before,
            stop,
            following: tokio::spawn(follow(log, stopped)),
        })
    }

    /// Call it when all requests have ended and the nodes are at rest. Returns a time for each transfer that ended without its
    /// commit.
    ///
    /// # Errors
    /// As [`AbortWatch::start`].
    pub async fn finish(self) -> Result<Vec<Duration>> {
        let _ = self.stop.send(());
        let after = self.following.await.context("nobody followed the log")??;
        let aborted = aborts(&self.victim, &self.before, &after);
        let since = |at: Instant| at.saturating_duration_since(self.begun);
        Ok(aborted.into_iter().map(since).collect())
    }
}

async fn follow(mut log: Log, mut stopped: oneshot::Receiver<()>) -> Result<Vec<(Instant, Line)>> {
    let mut seen = Vec::new();
    loop {
        // Before the look: what was written before the stop is seen.
        let is_last = !matches!(stopped.try_recv(), Err(TryRecvError::Empty));
        let lines = log.new_lines()?;
        let now = Instant::now();
        seen.extend(lines.into_iter().map(|line| (now, line)));
        if is_last {
            return Ok(seen);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// A log that others write.
#[derive(Debug)]
struct Log {
    file: File,
    /// A line that has not come whole yet.
    rest: Vec<u8>,
}

impl Log {
    /// The lines since the last call.
    fn new_lines(&mut self) -> Result<Vec<Line>> {
        self.file.read_to_end(&mut self.rest)?;
        let last = self.rest.iter().rposition(|byte| *byte == b'\n');
        let whole: Vec<u8> = self.rest.drain(..last.map_or(0, |at| at + 1)).collect();
        let lines = whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines
            .map(|line| serde_json::from_slice(line).with_context(|| String::from_utf8_lossy(line).into_owned()))
            .collect()
    }
}

/// The two nodes of one attempt, and what has ended of its transfer.
#[derive(Clone, Debug, Default)]
struct Attempt {
    prefill: Option<String>,
    decode: Option<(String, String)>,
    is_push_over: bool,
    is_receipt_over: bool,
}

type Key = (String, u32);

fn key_of(line: &Line) -> Option<Key> {
    Some((line.request_id.clone()?, line.attempt?))
}

/// When each transfer of a living node with the victim was over by the living node's last word on it. Those that were committed or
/// acknowledged are none, and neither are those that nobody had begun.
fn aborts(victim: &str, before: &[Line], after: &[(Instant, Line)]) -> Vec<Instant> {
    let mut attempts: BTreeMap<Key, Attempt> = BTreeMap::new();
    let mut by_transfer: BTreeMap<String, Key> = BTreeMap::new();
    for line in before {
        let key = match &line.step {
            Step::TransferEnded { transfer, .. } => by_transfer.get(transfer).cloned(),
            _ => key_of(line),
        };
        let Some(key) = key else { continue };
        let attempt = attempts.entry(key.clone()).or_default();
        match &line.step {
            Step::Accepted => attempt.prefill = Some(line.process.clone()),
            Step::Opened {
                transfer: Some(transfer),
            } => {
                by_transfer.insert(transfer.clone(), key);
                attempt.decode = Some((line.process.clone(), transfer.clone()));
            }
            Step::PushEnded { .. } => attempt.is_push_over = true,
            Step::Committed { .. } | Step::TransferEnded { .. } => attempt.is_receipt_over = true,
            _ => {}
        }
    }
    let living = attempts
        .iter()
        .filter_map(|(key, attempt)| Living::beside(victim, key, attempt));
    living.filter_map(|living| living.aborted_at(after)).collect()
}

/// The living end of a transfer whose other end has died.
struct Living<'a> {
    key: &'a Key,
    process: &'a str,
    transfer: &'a str,
    leg: Leg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leg {
    Push,
    Receipt,
}

/// What a line says of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Nothing,
    Aborted,
    /// It had come to its good end before the death was noticed.
    Done,
}

impl<'a> Living<'a> {
    fn beside(victim: &str, key: &'a Key, attempt: &'a Attempt) -> Option<Self> {
        let (decode, transfer) = attempt.decode.as_ref()?;
        let prefill = attempt.prefill.as_ref()?;
        let (process, leg) = if decode == victim && !attempt.is_push_over {
            (prefill, Leg::Push)
        } else if prefill == victim && !attempt.is_receipt_over {
            (decode, Leg::Receipt)
        } else {
            return None;
        };
        Some(Self {
            key,
            process,
            transfer,
            leg,
        })
    }

    fn aborted_at(&self, after: &[(Instant, Line)]) -> Option<Instant> {
        let mut last = None;
        for (at, line) in after {
            match self.word(line) {
                Word::Nothing => {}
                Word::Aborted => last = Some(*at),
                Word::Done => return None,
            }
        }
        last
    }

    fn word(&self, line: &Line) -> Word {
        if line.process != self.process {
            return Word::Nothing;
        }
        let is_of_attempt = key_of(line).as_ref() == Some(self.key);
        match (&line.step, self.leg) {
            (Step::PushEnded { end }, Leg::Push) if is_of_attempt && end == "acked" => Word::Done,
            (Step::PushEnded { .. }, Leg::Push) if is_of_attempt => Word::Aborted,
            (Step::Committed { transfer }, Leg::Receipt) if transfer == self.transfer => Word::Done,
            (Step::TransferEnded { transfer, .. }, Leg::Receipt) if transfer == self.transfer => Word::Aborted,
            (Step::Failed { .. } | Step::Cancelled, _) if is_of_attempt => Word::Aborted,
            _ => Word::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(process: &str, request: &str, step: Step) -> Line {
        Line {
            process: process.to_owned(),
            epoch: "e".to_owned(),
            seq: 1,
            t_us: 0,
            request_id: Some(request.to_owned()),
            attempt: Some(0),
            step,
        }
    }

    fn opened(transfer: &str) -> Step {
        Step::Opened {
            transfer: Some(transfer.to_owned()),
        }
    }

    /// Three requests on `p` and `d`, of which the last one's transfer is committed.
    fn before() -> Vec<Line> {
        let mut lines = Vec::new();
        for (request, transfer) in [("a", "1"), ("b", "2"), ("c", "3")] {
            lines.push(line("d", request, opened(transfer)));
            lines.push(line("p", request, Step::Accepted));
        }
        let transfer = "3".to_owned();
        lines.push(line("d", "c", Step::Committed { transfer }));
        let end = "acked".to_owned();
        lines.push(line("p", "c", Step::PushEnded { end }));
        lines
    }

    #[test]
    fn a_push_to_a_dead_node_is_over_with_its_own_last_word() {
        let at = |ms: u64| Instant::now() + Duration::from_millis(ms);
        let push_ended = |end: &str| Step::PushEnded { end: end.to_owned() };
        let (first, last) = (at(5), at(9));
        let after = [
            (first, line("p", "a", Step::Cancelled)),
            (last, line("p", "a", push_ended("failed"))),
            (last, line("p", "b", push_ended("acked"))),
        ];
        assert_eq!(aborts("d", &before(), &after), [last]);
        assert!(aborts("another", &before(), &after).is_empty());
    }

    #[test]
    fn a_receipt_from_a_dead_node_is_over_when_its_transfer_is() {
        let at = Instant::now();
        let mut ended = line(
            "d",
            "a",
            Step::TransferEnded {
                transfer: "1".to_owned(),
                end: "pair_lost".to_owned(),
            },
        );
        (ended.request_id, ended.attempt) = (None, None);
        let transfer = "2".to_owned();
        let after = [(at, ended), (at, line("d", "b", Step::Committed { transfer }))];
        assert_eq!(aborts("p", &before(), &after), [at]);
    }

    #[test]
    fn lines_come_once_and_only_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let text = serde_json::to_string(&line("p", "a", Step::Accepted)).expect("a line");
        std::fs::write(&path, format!("{text}\n{}", &text[..9])).expect("room");
        let file = File::open(&path).expect("the log");
        let mut log = Log { file, rest: Vec::new() };
        assert_eq!(log.new_lines().expect("lines").len(), 1);
        assert_eq!(log.new_lines().expect("lines").len(), 0);
        std::fs::write(&path, format!("{text}\n{text}\n")).expect("room");
        assert_eq!(log.new_lines().expect("lines").len(), 1);
    }
}
