//! Reads the event log of a run and says which steps were illegal, missing or double.
//!
//! The rules are those of PROTOCOL: one chain of phases for each request with one end, one end for each attempt on each
//! node, one reservation, at most one commit and one end for each transfer, and no gap in any process's numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use service_runtime::event_log::{Line, Step};
use serving_core::cluster::Phase;

/// What was seen, so that a check of an empty or wrong log cannot pass unnoticed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    pub lines: usize,
    pub requests: usize,
    pub transfers: usize,
    pub commits: usize,
    pub cancels: usize,
    /// In words; empty when the run was legal.
    pub violations: Vec<String>,
}

/// Reads and checks a whole log; everything in it must have come to its end.
///
/// # Errors
/// The file cannot be read or has a line that is none.
pub fn check_file(path: &Path) -> Result<Findings> {
    Ok(check(&read(path)?))
}

/// The same for a run in which the lives in `dead` were killed: what ran there has no end there.
///
/// # Errors
/// As [`check_file`].
pub fn check_file_with_dead(path: &Path, dead: BTreeSet<ProcessLife>) -> Result<Findings> {
    Ok(check_with_dead(&read(path)?, dead))
}

/// The life that wrote last of all lives of a process so far; `None` when none wrote.
///
/// # Errors
/// As [`check_file`].
pub fn last_life(path: &Path, process: &str) -> Result<Option<ProcessLife>> {
    last_life_in(&text(path)?, process)
}

/// Other processes still write: a line that crosses a page of the file can be seen half written, and is not one yet.
fn last_life_in(text: &str, process: &str) -> Result<Option<ProcessLife>> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    // From the end: after a hundred deaths the log has a hundred thousand lines.
    for line in whole.lines().rev() {
        let line: Line = serde_json::from_str(line).with_context(|| format!("no event: {line}"))?;
        if line.process == process {
            return Ok(Some(life_of(&line)));
        }
    }
    Ok(None)
}

fn read(path: &Path) -> Result<Vec<Line>> {
    let text = text(path)?;
    let lines = text.lines().enumerate();
    lines
        .map(|(i, line)| serde_json::from_str(line).with_context(|| format!("line {} is no event: {line}", i + 1)))
        .collect()
}

fn text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("no event log at {}", path.display()))
}

pub fn check(lines: &[Line]) -> Findings {
    check_with_dead(lines, BTreeSet::new())
}

fn check_with_dead(lines: &[Line], dead: BTreeSet<ProcessLife>) -> Findings {
    let mut checker = Checker {
        dead,
        ..Checker::default()
    };
    for line in lines {
        checker.line(line);
    }
    checker.finish(lines.len())
}

/// One life of one process: its name and its epoch.
pub type ProcessLife = (String, String);

fn life_of(line: &Line) -> ProcessLife {
    (line.process.clone(), line.epoch.clone())
}

/// One attempt on one process.
#[derive(Debug, PartialEq, Eq)]
enum Life {
    Running,
    Over,
}

#[derive(Debug, Default)]
struct Transfer {
    commits: usize,
    ends: usize,
}

#[derive(Debug, Default)]
struct Checker {
    findings: Findings,
    dead: BTreeSet<ProcessLife>,
    last_seq: BTreeMap<ProcessLife, u64>,
    /// At the coordinator; `None` once ended.
    phases: BTreeMap<(ProcessLife, String), Option<String>>,
    attempts: BTreeMap<(ProcessLife, String, u32), Life>,
    transfers: BTreeMap<String, Transfer>,
}

impl Checker {
    fn violation(&mut self, line: &Line, what: impl std::fmt::Display) {
        let of = line.request_id.as_deref().unwrap_or("?");
        let attempt = line
            .attempt
            .map_or_else(String::new, |attempt| format!(" attempt {attempt}"));
        let text = format!("{} line {}: request {of}{attempt}: {what}", line.process, line.seq);
        self.findings.violations.push(text);
    }

    fn line(&mut self, line: &Line) {
        let life = life_of(line);
        let last = self.last_seq.insert(life, line.seq).unwrap_or(0);
        if line.seq != last + 1 {
            self.violation(line, format!("follows line {last}: lines are missing or double"));
        }
        match &line.step {
            Step::Arrived | Step::Phase { .. } | Step::Ended => self.coordinator(line),
            Step::TransferEnded { transfer, .. } => match self.transfers.get_mut(transfer) {
                Some(known) => known.ends += 1,
                None => self.violation(line, format!("transfer {transfer} ends and was never opened")),
            },
            _ => self.node(line),
        }
    }

    fn coordinator(&mut self, line: &Line) {
        let request = (life_of(line), line.request_id.clone().unwrap_or_default());
        let known = self.phases.get(&request).cloned();
        match (&line.step, known) {
            (Step::Arrived, None) => {
                self.phases.insert(request, Some(Phase::Queued.name().to_owned()));
                self.findings.requests += 1;
            }
            (Step::Phase { from, to }, Some(Some(now))) => {
                if *from != now || !may_become(from, to) {
                    self.violation(line, format!("goes from {from} to {to}, was {now}"));
                }
                self.phases.insert(request, Some(to.clone()));
            }
            (Step::Ended, Some(Some(_))) => {
                self.phases.insert(request, None);
            }
            (step, Some(None)) => self.violation(line, format!("{step:?} after its end")),
            (step, _) => self.violation(line, format!("{step:?} out of turn")),
        }
    }

    fn node(&mut self, line: &Line) {
        let key = (
            life_of(line),
            line.request_id.clone().unwrap_or_default(),
            line.attempt.unwrap_or_default(),
        );
        let life = self.attempts.get(&key);
        match &line.step {
            Step::Opened { .. } | Step::Accepted if life.is_none() => {
                if let Step::Opened { transfer: Some(id) } = &line.step
                    && self.transfers.insert(id.clone(), Transfer::default()).is_some()
                {
                    self.violation(line, format!("transfer {id} was opened before"));
                }
                self.attempts.insert(key, Life::Running);
            }
            Step::Refused { .. } if life.is_none() => {}
            // The push outlives the attempt it belongs to.
            Step::PushEnded { .. } if life.is_some() => {}
            Step::FirstTokens { .. } if life == Some(&Life::Running) => {}
            Step::Committed { transfer } if life == Some(&Life::Running) => {
                self.findings.commits += 1;
                let commits = self.transfers.get_mut(transfer).map(|known| {
                    known.commits += 1;
                    known.commits
                });
                if commits != Some(1) {
                    self.violation(line, format!("transfer {transfer} is committed {commits:?} times"));
                }
            }
            Step::Finished | Step::Failed { .. } | Step::Cancelled if life == Some(&Life::Running) => {
                self.findings.cancels += usize::from(line.step == Step::Cancelled);
                self.attempts.insert(key, Life::Over);
            }
            step => self.violation(line, format!("{step:?} while {life:?}", life = self.attempts.get(&key))),
        }
    }

    fn finish(mut self, lines: usize) -> Findings {
        let open_requests = self.phases.iter().filter(|(_, phase)| phase.is_some());
        let mut unfinished: Vec<String> = open_requests
            .filter(|((life, _), _)| !self.dead.contains(life))
            .map(|((_, request), phase)| format!("request {request} never ended, its phase is {phase:?}"))
            .collect();
        let running = self.attempts.iter().filter(|(_, life)| **life == Life::Running);
        let running = running.filter(|((life, _, _), _)| !self.dead.contains(life));
        unfinished.extend(running.map(|(((process, _), request, attempt), _)| {
            format!("{process}: request {request} attempt {attempt} never ended there")
        }));
        let twice = self.transfers.iter().filter(|(_, transfer)| transfer.ends > 1);
        unfinished.extend(twice.map(|(id, transfer)| format!("transfer {id} ended {} times", transfer.ends)));
        self.findings.violations.extend(unfinished);
        self.findings.lines = lines;
        self.findings.transfers = self.transfers.len();
        self.findings
    }
}

fn may_become(from: &str, to: &str) -> bool {
    let phase = |name: &str| Phase::ALL.into_iter().find(|phase| phase.name() == name);
    matches!((phase(from), phase(to)), (Some(from), Some(to)) if from.may_become(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Log(Vec<Line>);

    impl Log {
        fn step(&mut self, process: &str, step: Step) -> &mut Self {
            let seq = self.0.iter().filter(|line| line.process == process).count() as u64 + 1;
            self.0.push(Line {
                process: process.to_owned(),
                epoch: "e".to_owned(),
                seq,
                t_us: 0,
                request_id: Some("r".to_owned()),
                attempt: Some(0),
                step,
            });
            self
        }
    }

    #[test]
    fn a_line_that_is_half_written_is_none_yet() {
        let mut log = Log(Vec::new());
        log.step("c", Step::Arrived).step("d", Step::Arrived);
        let lines: Vec<String> = log.0.iter().map(|line| serde_json::to_string(line).unwrap()).collect();
        let text = lines.join("\n") + "\n";
        for half in ["", &lines[0][..20]] {
            let seen = last_life_in(&format!("{text}{half}"), "c").expect("whole lines");
            assert_eq!(seen, Some(life_of(&log.0[0])));
        }
        assert!(
            last_life_in(&format!("{}\n", &lines[0][..20]), "c").is_err(),
            "a line that ended so is broken"
        );
    }

    fn phase(from: Phase, to: Phase) -> Step {
        Step::Phase {
            from: from.name().to_owned(),
            to: to.name().to_owned(),
        }
    }

    fn good() -> Log {
        let transfer = || "t".to_owned();
        let mut log = Log(Vec::new());
        log.step("c", Step::Arrived)
            .step("c", phase(Phase::Queued, Phase::Opening))
            .step(
                "d",
                Step::Opened {
                    transfer: Some(transfer()),
                },
            )
            .step("c", phase(Phase::Opening, Phase::Opened))
            .step("p", Step::Accepted)
            .step("p", Step::FirstTokens { continues: true })
            .step("c", phase(Phase::Opened, Phase::Transferring))
            .step("d", Step::Committed { transfer: transfer() })
            .step(
                "p",
                Step::PushEnded {
                    end: "acked".to_owned(),
                },
            )
            .step("p", Step::Finished)
            .step("c", phase(Phase::Transferring, Phase::Committed))
            .step("d", Step::Finished)
            .step("c", Step::Ended);
        log
    }

    #[test]
    fn a_legal_run_has_no_violation() {
        let findings = check(&good().0);
        assert_eq!(findings.violations, Vec::<String>::new());
        assert_eq!((findings.requests, findings.transfers, findings.commits), (1, 1, 1));
    }

    #[test]
    fn each_kind_of_violation_is_found() {
        let broken = |change: &dyn Fn(&mut Log)| {
            let mut log = good();
            change(&mut log);
            check(&log.0).violations.join("; ")
        };
        assert!(
            broken(&|log| {
                log.0.remove(1);
            })
            .contains("missing or double")
        );
        assert!(
            broken(&|log| {
                log.0.pop();
            })
            .contains("never ended")
        );
        assert!(
            broken(&|log| {
                log.step("c", Step::Ended);
            })
            .contains("after its end")
        );
        assert!(
            broken(&|log| {
                log.step("d", Step::Finished);
            })
            .contains("Over")
        );
        let again = Step::Committed {
            transfer: "t".to_owned(),
        };
        let twice = |log: &mut Log| {
            let end = log
                .0
                .iter()
                .position(|line| line.process == "d" && line.step == Step::Finished);
            let mut line = log.0[end.expect("it finished")].clone();
            line.step = again.clone();
            log.0.insert(end.expect("it finished"), line);
        };
        assert!(broken(&twice).contains("committed Some(2) times"));
        assert!(
            broken(&|log| {
                log.step("c", phase(Phase::Committed, Phase::Queued));
            })
            .contains("after its end")
        );
        let illegal = |log: &mut Log| log.0[1].step = phase(Phase::Queued, Phase::Decoding);
        assert!(broken(&illegal).contains("from queued to decoding"));
    }
}
