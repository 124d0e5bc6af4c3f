//! A part of a step, in a process of its own that prints what it finds line by line. What it found before it broke or hung is kept.

use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::child::{self, Ended};
use super::step::{Check, Figure, Outcome, Row, StepReport};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    Machine,
    /// Owns memory that another process opens.
    Ipc,
    IpcPeer,
    /// The first rank of each communicator.
    Nccl,
    NcclPeer,
    Model,
}

impl Part {
    /// This program for the part on a device.
    ///
    /// # Errors
    /// The system does not say where this program is.
    pub fn command(self, device: u32) -> anyhow::Result<Command> {
        let part = self.to_possible_value().context("a part without a name")?;
        let mut command = child::this_program()?;
        command.args([format!("--part={}", part.get_name()), format!("--device={device}")]);
        Ok(command)
    }
}

/// A line of a part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    Check(Check),
    Figure(Figure),
    NotRun(String),
}

/// Prints a line.
///
/// # Errors
/// Nobody reads.
pub(super) fn tell(line: &Line) -> anyhow::Result<()> {
    let mut out = crate::stdout::stdout();
    writeln!(out, "{}", serde_json::to_string(line)?)?;
    Ok(out.flush()?)
}

/// Prints a check, and hands on what it brought if it is right.
///
/// # Errors
/// Nobody reads.
pub(super) fn told<T>(
    what: &str,
    made: anyhow::Result<T>,
    seen: impl FnOnce(&T) -> String,
) -> anyhow::Result<Option<T>> {
    let check = Check {
        what: what.to_owned(),
        is_right: made.is_ok(),
        said: match &made {
            Ok(brought) => seen(brought),
            Err(error) => format!("{error:#}"),
        },
    };
    tell(&Line::Check(check))?;
    Ok(made.ok())
}

/// What a part left.
#[derive(Debug)]
pub(super) struct PartReport {
    lines: Vec<Line>,
    /// Why it did not come to its end.
    trouble: Option<String>,
    took: Duration,
}

/// Starts a part and waits for its end, at most for so long. Whatever happens is in the report.
pub(super) fn run_apart(command: anyhow::Result<Command>, limit: Duration) -> PartReport {
    let begun = Instant::now();
    match command.and_then(|command| child::run(command, limit)) {
        Ok(ended) => PartReport {
            lines: lines(&ended.stdout),
            trouble: trouble(&ended, limit),
            took: ended.took,
        },
        Err(error) => PartReport {
            lines: Vec::new(),
            trouble: Some(format!("{error:#}")),
            took: begun.elapsed(),
        },
    }
}

/// A library may print lines of its own.
fn lines(stdout: &str) -> Vec<Line> {
    let lines = stdout.lines();
    lines.filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn trouble(ended: &Ended, limit: Duration) -> Option<String> {
    let stderr = &ended.stderr;
    match ended.status {
        Some(status) if status.success() => None,
        Some(status) => Some(format!("{status}: {stderr}")),
        None => Some(format!(
            "it had not ended after {} s and was killed {stderr}",
            limit.as_secs()
        )),
    }
}

impl PartReport {
    /// A wrong check says more than the trouble that may follow from it.
    pub fn step(self, row: Row) -> StepReport {
        let (mut checks, mut figures, mut not_run) = (Vec::new(), Vec::new(), None);
        for line in self.lines {
            match line {
                Line::Check(check) => checks.push(check),
                Line::Figure(figure) => figures.push(figure),
                Line::NotRun(why) => not_run = Some(why),
            }
        }
        let count = figures.len();
        let is_unchecked = checks.is_empty();
        let mut report = StepReport::of_checks(row, checks);
        let has_wrong_check = report.is_wrong() && !is_unchecked;
        report.outcome = match (self.trouble, not_run) {
            _ if has_wrong_check => report.outcome,
            (Some(why), _) => Outcome::Wrong { why },
            (None, Some(why)) => Outcome::NotRun { why },
            (None, None) if is_unchecked && count > 0 => Outcome::Measured {
                said: format!("{count} figures"),
            },
            (None, None) => report.outcome,
        };
        report.figures = figures;
        report.seconds = self.took.as_secs_f64();
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(stdout: &str, trouble: Option<&str>) -> StepReport {
        let part = PartReport {
            lines: lines(stdout),
            trouble: trouble.map(str::to_owned),
            took: Duration::from_secs(1),
        };
        part.step(Row::Nccl)
    }

    fn line(is_right: bool) -> String {
        let check = Check {
            what: "an exchange".to_owned(),
            is_right,
            said: "seen".to_owned(),
        };
        serde_json::to_string(&Line::Check(check)).expect("plain data")
    }

    #[test]
    fn what_a_part_found_before_it_hung_is_kept_and_the_step_is_wrong() {
        let hung = report(
            &format!("NCCL INFO a line of a library\n{}", line(true)),
            Some("it hung"),
        );
        assert_eq!(hung.checks.len(), 1);
        let why = "it hung".to_owned();
        assert_eq!(hung.outcome, Outcome::Wrong { why });
    }

    #[test]
    fn a_wrong_check_says_more_than_the_end_of_its_process() {
        let both = report(&line(false), Some("it ended with 1"));
        let why = "an exchange: seen".to_owned();
        assert_eq!(both.outcome, Outcome::Wrong { why });
    }

    #[test]
    fn a_part_that_says_why_it_did_not_run_is_neither_right_nor_wrong() {
        let not_run = report("{\"not_run\":\"no model\"}", None);
        let why = "no model".to_owned();
        assert_eq!(not_run.outcome, Outcome::NotRun { why });
        assert!(report("", None).is_wrong(), "silence is no result");
    }
}
