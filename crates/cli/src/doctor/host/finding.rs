//! What one check found, and all of them as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use crate::exit::Exit;
use crate::observe::format::clean;
use crate::terminal::{Paint, Terminal};
use crate::version::VERSION;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Group {
    Machine,
    Model,
    Ports,
    Etcd,
    Collector,
}

impl Group {
    fn heading(self) -> &'static str {
        match self {
            Group::Machine => "machine",
            Group::Model => "model",
            Group::Ports => "ports",
            Group::Etcd => "etcd",
            Group::Collector => "collector",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    Ok,
    /// A cluster runs, and something is not as it should be.
    Warn,
    /// A cluster does not run like this.
    Fail,
    /// There is nothing to look at.
    NotConfigured,
}

impl Verdict {
    fn word(self) -> (&'static str, Paint) {
        match self {
            Verdict::Ok => ("ok", Paint::Good),
            Verdict::Warn => ("WARN", Paint::Warn),
            Verdict::Fail => ("FAIL", Paint::Bad),
            Verdict::NotConfigured => ("-", Paint::Dim),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub group: Group,
    pub check: &'static str,
    pub verdict: Verdict,
    pub seen: String,
    /// The next step. Null when there is nothing to do.
    pub to_do: Option<String>,
}

impl Group {
    pub fn ok(self, check: &'static str, seen: impl Into<String>) -> Finding {
        self.finding((check, Verdict::Ok), seen.into(), None)
    }

    pub fn warn(self, check: &'static str, seen: impl Into<String>, to_do: impl Into<String>) -> Finding {
        self.finding((check, Verdict::Warn), seen.into(), Some(to_do.into()))
    }

    pub fn fail(self, check: &'static str, seen: impl Into<String>, to_do: impl Into<String>) -> Finding {
        self.finding((check, Verdict::Fail), seen.into(), Some(to_do.into()))
    }

    pub fn not_configured(self, check: &'static str, seen: impl Into<String>) -> Finding {
        self.finding((check, Verdict::NotConfigured), seen.into(), None)
    }

    fn finding(self, (check, verdict): (&'static str, Verdict), seen: String, to_do: Option<String>) -> Finding {
        Finding {
            group: self,
            check,
            verdict,
            seen,
            to_do,
        }
    }
}

/// Everything that was found.
#[derive(Debug, Serialize)]
pub(super) struct Findings {
    version: &'static str,
    /// Nothing has failed.
    is_ok: bool,
    checks: Vec<Finding>,
}

impl Findings {
    pub fn new(checks: Vec<Finding>) -> Self {
        Self {
            version: VERSION,
            is_ok: checks.iter().all(|finding| finding.verdict != Verdict::Fail),
            checks,
        }
    }

    pub fn exit(&self) -> Exit {
        match self.is_ok {
            true => Exit::Ok,
            false => Exit::Failure,
        }
    }

    /// A heading for each group, a line for each check, and under it what to do.
    pub fn text(&self, terminal: Terminal) -> String {
        let mut text = String::new();
        let mut group = None;
        for finding in &self.checks {
            if group.replace(finding.group) != Some(finding.group) {
                let _ = writeln!(text, "{}", terminal.bold(finding.group.heading()));
            }
            let (word, paint) = finding.verdict.word();
            let word = terminal.paint(&format!("{word:<4}"), paint);
            let _ = writeln!(text, "  {word}  {:<12}  {}", finding.check, one_line(&finding.seen));
            if let Some(to_do) = &finding.to_do {
                let _ = writeln!(text, "        do: {}", one_line(to_do));
            }
        }
        let count = |verdict: Verdict| self.checks.iter().filter(|finding| finding.verdict == verdict).count();
        let (warned, failed) = (count(Verdict::Warn), count(Verdict::Fail));
        let conclusion = match (failed, warned) {
            (0, 0) => "This machine can serve.".to_owned(),
            (0, 1) => "This machine can serve; 1 warning.".to_owned(),
            (0, warned) => format!("This machine can serve; {warned} warnings."),
            (1, _) => "1 check has failed: a cluster does not start like this.".to_owned(),
            (failed, _) => format!("{failed} checks have failed: a cluster does not start like this."),
        };
        let _ = writeln!(text, "\n{conclusion} `baton doctor --gpu` looks at the GPU.");
        text
    }
}

/// Words of other programs and servers may have several lines, and characters that steer a terminal.
fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    clean(&lines.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_failed_check_makes_the_exit_status_a_failure() {
        let fine = vec![
            Group::Machine.ok("cores", "2 cores"),
            Group::Ports.warn("API", "in use", "give another"),
            Group::Etcd.not_configured("etcd", "none"),
        ];
        let damaged = Group::Model.fail("file", "damaged\nbadly", "pull it again");
        let failed = [fine.clone(), vec![damaged]].concat();
        assert_eq!(Findings::new(fine).exit(), Exit::Ok);
        let findings = Findings::new(failed);
        assert_eq!(findings.exit(), Exit::Failure);
        let text = findings.text(Terminal::plain());
        for part in [
            "machine\n  ok    cores",
            "do: give another",
            "FAIL  file",
            "damaged badly",
            "1 check has failed",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn the_json_has_every_key_of_every_check() {
        let findings = Findings::new(vec![Group::Machine.ok("cores", "2 cores")]);
        let json = serde_json::to_value(findings).expect("plain data");
        let expected = serde_json::json!({
            "group": "machine", "check": "cores", "verdict": "ok", "seen": "2 cores", "to_do": null
        });
        assert_eq!(
            (&json["is_ok"], &json["checks"][0]),
            (&serde_json::json!(true), &expected)
        );
    }
}
