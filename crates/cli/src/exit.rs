//! The exit statuses of all verbs, and how a result becomes one.

use std::fmt;
use std::process::ExitCode;

use crate::stdout::is_reader_gone;
use crate::terminal::say;

/// The documented exit statuses. A verb that fails without saying which one is a `Failure`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Ok = 0,
    Failure = 1,
    Usage = 2,
    /// A contract was not met: an SLO, a comparison, a token-exactness check.
    NotMet = 3,
    /// No server answered at the given address.
    Unreachable = 4,
    /// A comparison has no verdict: it is incomplete, or a field of its fairness list is missing. A sweep has no knee, no setting is
    /// chosen, or a contract is not judged: the client sent late.
    NoVerdict = 5,
    /// Ended by Ctrl-C: 128 + SIGINT, as shells expect.
    Interrupted = 130,
}

/// The text under `--help` that documents the statuses.
pub const EXIT_STATUS_HELP: &str = "Exit status: 0 ok, 1 failure, 2 usage, 3 contract or SLO not met, \
     4 server unreachable, 5 no verdict, 130 interrupted.";

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// An error that knows its exit status. Attach one with [`WithExit::exit`].
#[derive(Debug)]
pub struct ExitError {
    pub exit: Exit,
    source: anyhow::Error,
}

impl ExitError {
    pub fn new(exit: Exit, source: anyhow::Error) -> Self {
        Self { exit, source }
    }
}

impl fmt::Display for ExitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl std::error::Error for ExitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.source()
    }
}

/// `result.exit(Exit::Unreachable)` sets the status with which this failure ends the process.
pub trait WithExit<T> {
    fn exit(self, exit: Exit) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> WithExit<T> for Result<T, E> {
    fn exit(self, exit: Exit) -> anyhow::Result<T> {
        self.map_err(|error| anyhow::Error::new(ExitError::new(exit, error.into())))
    }
}

/// The status with which an error ends the process: the outermost status that was attached.
pub fn of(error: &anyhow::Error) -> Exit {
    error
        .chain()
        .find_map(|cause| cause.downcast_ref::<ExitError>())
        .map_or(Exit::Failure, |error| error.exit)
}

/// How a failure is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorForm {
    /// `error: what: why: why`.
    Text,
    /// One line of JSON, for a verb whose result is JSON too.
    Json,
}

impl ErrorForm {
    pub(crate) fn line(self, error: &anyhow::Error) -> String {
        match self {
            ErrorForm::Text => steering_nothing(&format!("error: {error:#}")),
            ErrorForm::Json => {
                let status = of(error) as u8;
                serde_json::json!({"error": {"message": format!("{error:#}"), "exit_status": status}}).to_string()
            }
        }
    }
}

/// An error has the words of servers and of other programs. No control character of them reaches the terminal, but for the ends of lines.
fn steering_nothing(text: &str) -> String {
    let steers = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    text.chars().map(|c| if steers(c) { '?' } else { c }).collect()
}

/// Prints a failure on stderr and yields the status to return from `main`.
pub(crate) fn report(outcome: anyhow::Result<Exit>, form: ErrorForm) -> ExitCode {
    match outcome {
        Ok(exit) => exit.into(),
        // As in `baton logs | head`: the reader has what it wanted.
        Err(error) if is_reader_gone(&error) => Exit::Ok.into(),
        Err(error) => {
            say!("{}", form.line(&error));
            of(&error).into()
        }
    }
}

/// Prints clap's output: help and version on stdout with status 0, a usage error on stderr with status 2.
pub(crate) fn report_usage(error: &clap::Error) -> ExitCode {
    // When the reader closes the pipe (`baton --help | head`), that is no failure.
    let _ = error.print();
    if error.use_stderr() {
        Exit::Usage.into()
    } else {
        Exit::Ok.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_plain_error_is_a_failure() {
        assert_eq!(of(&anyhow::anyhow!("x")), Exit::Failure);
    }

    #[test]
    fn the_attached_status_survives_context_and_keeps_the_causes() {
        let inner: Result<(), std::io::Error> = Err(std::io::Error::other("refused"));
        let error = inner
            .context("cannot reach http://x")
            .exit(Exit::Unreachable)
            .context("chat")
            .expect_err("an error");
        assert_eq!(of(&error), Exit::Unreachable);
        assert_eq!(format!("{error:#}"), "chat: cannot reach http://x: refused");
        let json: serde_json::Value = serde_json::from_str(&ErrorForm::Json.line(&error)).expect("JSON");
        let expected = serde_json::json!({"message": "chat: cannot reach http://x: refused", "exit_status": 4});
        assert_eq!(json["error"], expected);
    }

    #[test]
    fn no_control_character_of_a_servers_words_reaches_the_terminal() {
        let error = anyhow::anyhow!("502 Bad Gateway: a\x1b]52;c;x\x07b\n    the second line");
        assert_eq!(
            ErrorForm::Text.line(&error),
            "error: 502 Bad Gateway: a?]52;c;x?b\n    the second line"
        );
    }

    #[test]
    fn only_a_closed_stdout_ends_a_verb_quietly() {
        use std::io::Write as _;
        let printed = write!(crate::stdout::test_kit::unread(), "x");
        assert_eq!(
            report(printed.context("logs").map(|()| Exit::Failure), ErrorForm::Text),
            Exit::Ok.into()
        );
        // A server that closes while the request is written.
        let sent: Result<Exit, _> = Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        let sent = sent.context("cannot reach http://x");
        assert_eq!(
            report(sent.exit(Exit::Unreachable), ErrorForm::Text),
            Exit::Unreachable.into()
        );
    }
}
