//! Stdout, whose closed reader is told apart from every other broken connection.
//! Never decides an exit status. `exit::report` asks it whether a failure is only that nobody reads.

use std::io::{self, StdoutLock, Write};

use thiserror::Error;

/// The mark of an error of stdout. A socket that breaks gives `BrokenPipe` as well, and that is a failure of the verb.
#[derive(Debug, Error)]
#[error("nobody reads stdout any more")]
struct ReaderGone;

/// A writer whose `BrokenPipe` has the mark.
#[derive(Debug)]
pub(crate) struct Marked<W>(W);

/// Stdout, for everything that a verb prints.
pub(crate) fn stdout() -> Marked<StdoutLock<'static>> {
    Marked(io::stdout().lock())
}

fn marked(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, ReaderGone),
        _ => error,
    }
}

impl<W: Write> Write for Marked<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(marked)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(marked)
    }
}

fn has_mark(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<ReaderGone>())
}

/// Whether this failure is only that nobody reads stdout (`baton logs | head`).
pub(crate) fn is_reader_gone(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(has_mark)
}

/// What was written last. A reader that has gone away changes nothing then: the verb ends with its own status.
///
/// # Errors
/// Stdout takes nothing for another reason, as on a full disk.
pub(crate) fn unless_reader_gone(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if has_mark(&error) => Ok(()),
        other => other,
    }
}

/// Prints a part of what a verb has to say. When nobody reads any more, the verb ends by the error.
///
/// # Errors
/// Stdout is closed.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = stdout();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Prints the result of a verb whose status is decided.
///
/// # Errors
/// As `unless_reader_gone`.
pub(crate) fn print_result(text: &str) -> anyhow::Result<()> {
    let mut out = stdout();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    Ok(unless_reader_gone(written)?)
}

#[cfg(test)]
pub(crate) mod test_kit {
    use super::*;

    /// A stdout that takes nothing.
    pub(crate) struct Refusing(pub io::ErrorKind);

    impl Write for Refusing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A stdout that nobody reads.
    pub(crate) fn unread() -> Marked<Refusing> {
        Marked(Refusing(io::ErrorKind::BrokenPipe))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;

    #[test]
    fn only_stdout_without_a_reader_has_the_mark() {
        let of_stdout = write!(test_kit::unread(), "x").expect_err("nobody reads");
        assert!(is_reader_gone(&anyhow::Error::new(of_stdout).context("bench run")));
        let of_socket = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(!is_reader_gone(&of_socket.into()));
        let full = write!(Marked(test_kit::Refusing(io::ErrorKind::StorageFull)), "x");
        assert!(!is_reader_gone(&full.context("a full disk").expect_err("it fails")));
    }

    #[test]
    fn a_reader_that_is_gone_is_no_failure_of_a_result_and_a_full_disk_is() {
        assert!(unless_reader_gone(write!(test_kit::unread(), "x")).is_ok());
        let full = write!(Marked(test_kit::Refusing(io::ErrorKind::StorageFull)), "x");
        assert!(unless_reader_gone(full).is_err());
    }
}
