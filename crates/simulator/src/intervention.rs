//! What happens to nodes on purpose, at a time of the trace: a death, a standstill, a drain, another role.

use std::fmt;
use std::time::Duration;

use serving_core::node::AssignedRole;
use thiserror::Error;

/// One event of a scenario.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intervention {
    pub node: String,
    /// From the start of the trace.
    pub at: Duration,
    pub what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The process is gone. After `back_after` a new life of it joins; `None`: never.
    Fail {
        back_after: Option<Duration>,
    },
    /// The process stands still, as after SIGSTOP.
    Pause {
        lasts: Duration,
    },
    Drain,
    Role {
        role: AssignedRole,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InterventionError {
    #[error("`{given}` is no {kind}: write {form}")]
    Form {
        given: String,
        kind: &'static str,
        form: &'static str,
    },
    #[error("`{given}` names the role `{role}`; roles are prefill, decode and co-located")]
    Role { given: String, role: String },
}

/// `250ms`, `120s`, `2m`, `90` (seconds).
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let scale = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3_600.0,
        _ => return None,
    };
    let seconds = number.trim().parse::<f64>().ok()? * scale;
    // A year: longer than any trace.
    (0.0..=3.2e7)
        .contains(&seconds)
        .then(|| Duration::from_secs_f64(seconds))
}

const FAIL_FORM: &str = "NODE@TIME or NODE@TIME+DOWN, for example decode-3@120s or decode-3@120s+30s";
const PAUSE_FORM: &str = "NODE@TIME+LENGTH, for example decode-0@60s+5s";
const DRAIN_FORM: &str = "NODE@TIME, for example prefill-1@90s";
const ROLE_FORM: &str = "NODE=ROLE@TIME, for example prefill-1=decode@90s";

impl Intervention {
    /// # Errors
    /// The text's fault; the error shows the form.
    pub fn fail(text: &str) -> Result<Self, InterventionError> {
        let (node, at, length) = parts(text).ok_or_else(|| wrong(text, "failure", FAIL_FORM))?;
        let what = What::Fail { back_after: length };
        Ok(Self { node, at, what })
    }

    /// # Errors
    /// As [`Intervention::fail`].
    pub fn pause(text: &str) -> Result<Self, InterventionError> {
        match parts(text) {
            Some((node, at, Some(lasts))) => Ok(Self {
                node,
                at,
                what: What::Pause { lasts },
            }),
            _ => Err(wrong(text, "pause", PAUSE_FORM)),
        }
    }

    /// When a standstill is over or the next life begins; of others, when they begin. From the start of the trace.
    pub(crate) fn ends(&self) -> Duration {
        match self.what {
            What::Pause { lasts } => self.at + lasts,
            What::Fail { back_after } => self.at + back_after.unwrap_or_default(),
            What::Drain | What::Role { .. } => self.at,
        }
    }

    /// # Errors
    /// As [`Intervention::fail`].
    pub fn drain(text: &str) -> Result<Self, InterventionError> {
        match parts(text) {
            Some((node, at, None)) => Ok(Self {
                node,
                at,
                what: What::Drain,
            }),
            _ => Err(wrong(text, "drain", DRAIN_FORM)),
        }
    }

    /// # Errors
    /// As [`Intervention::fail`]; a role that there is not.
    pub fn role(text: &str) -> Result<Self, InterventionError> {
        let form = || wrong(text, "change of role", ROLE_FORM);
        let (node, rest) = text.split_once('=').ok_or_else(form)?;
        let (role, at) = rest.split_once('@').ok_or_else(form)?;
        let at = parse_duration(at).ok_or_else(form)?;
        let known = AssignedRole::by_name(role.trim()).ok_or_else(|| InterventionError::Role {
            given: text.to_owned(),
            role: role.to_owned(),
        })?;
        Ok(Self {
            node: node.trim().to_owned(),
            at,
            what: What::Role { role: known },
        })
    }
}

fn wrong(given: &str, kind: &'static str, form: &'static str) -> InterventionError {
    InterventionError::Form {
        given: given.to_owned(),
        kind,
        form,
    }
}

/// `NODE@TIME[+LENGTH]`
fn parts(text: &str) -> Option<(String, Duration, Option<Duration>)> {
    let (node, times) = text.split_once('@')?;
    let (at, length) = match times.split_once('+') {
        Some((at, length)) => (at, Some(parse_duration(length)?)),
        None => (times, None),
    };
    let node = node.trim();
    (!node.is_empty()).then_some(())?;
    Some((node.to_owned(), parse_duration(at)?, length))
}

impl fmt::Display for Intervention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (node, at) = (&self.node, self.at.as_secs_f64());
        match self.what {
            What::Fail { back_after: None } => write!(f, "{node} fails at {at} s"),
            What::Fail { back_after: Some(down) } => {
                write!(f, "{node} fails at {at} s and is back after {} s", down.as_secs_f64())
            }
            What::Pause { lasts } => write!(f, "{node} stands still at {at} s for {} s", lasts.as_secs_f64()),
            What::Drain => write!(f, "{node} is drained at {at} s"),
            What::Role { role } => write!(f, "{node} becomes {} at {at} s", role.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_is_read() {
        let at = Duration::from_secs;
        let fail = Intervention::fail("decode-3@120s+30s").expect("a failure");
        assert_eq!((fail.node.as_str(), fail.at), ("decode-3", at(120)));
        assert_eq!(
            fail.what,
            What::Fail {
                back_after: Some(at(30))
            }
        );
        assert_eq!(
            Intervention::fail("a@2m").map(|i| (i.at, i.what)),
            Ok((at(120), What::Fail { back_after: None }))
        );
        let pause = Intervention::pause("decode-0@500ms+5").expect("a pause");
        assert_eq!(
            (pause.at, pause.what),
            (Duration::from_millis(500), What::Pause { lasts: at(5) })
        );
        let role = Intervention::role("prefill-1=decode@90s").expect("a role");
        assert_eq!(
            role.what,
            What::Role {
                role: AssignedRole::Decode
            }
        );
        assert_eq!(Intervention::drain("x@1h").map(|i| i.at), Ok(at(3_600)));
    }

    #[test]
    fn what_is_wrong_shows_the_form() {
        for text in [
            "",
            "decode-0",
            "@5s",
            "decode-0@",
            "decode-0@-1s",
            "decode-0@5x",
            "decode-0@nan",
            "d@1s+",
        ] {
            assert!(
                matches!(Intervention::fail(text), Err(InterventionError::Form { .. })),
                "{text:?}"
            );
        }
        assert!(Intervention::pause("decode-0@5s").is_err(), "a pause has a length");
        assert!(Intervention::drain("decode-0@5s+3s").is_err());
        assert!(matches!(
            Intervention::role("p=boss@1s"),
            Err(InterventionError::Role { .. })
        ));
    }
}
