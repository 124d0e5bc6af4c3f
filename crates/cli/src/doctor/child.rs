//! This program, started again for a part of its work: what breaks or hangs there ends that process and no other.

use std::io::{ErrorKind, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;

const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A process that does not end after a kill hangs in the driver. It is left alone then.
const END_WITHIN: Duration = Duration::from_secs(10);
/// The output is there when its process has ended, unless a process that it left behind holds the pipe.
const OUTPUT_WITHIN: Duration = Duration::from_secs(1);
/// More than any part prints. The rest is dropped.
const OUTPUT_BYTES_MAX: usize = 16 << 20;
const PIECE_BYTES: usize = 8 << 10;

/// A process that has ended, or was ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub stdout: String,
    pub stderr: String,
    /// `None`: it had not ended in time and was killed.
    pub status: Option<ExitStatus>,
    pub took: Duration,
}

/// This program and the words of its verb.
///
/// # Errors
/// The system does not say where this program is.
pub(super) fn this_program() -> anyhow::Result<Command> {
    let executable = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(executable);
    command.args(["doctor", "--gpu"]);
    Ok(command)
}

/// Runs a process to its end, or kills it when its time is over.
///
/// # Errors
/// It cannot be started.
pub(super) fn run(mut command: Command, limit: Duration) -> anyhow::Result<Ended> {
    let begun = Instant::now();
    let started = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = started.with_context(|| format!("cannot start {program}"))?;
    let stdout = child.stdout.take().map(Output::of);
    let stderr = child.stderr.take().map(Output::of);
    let status = wait(&mut child, begun + limit)?;
    if status.is_none() {
        kill(&mut child)?;
    }
    let text = |output: Option<Output>| output.map(Output::text).unwrap_or_default();
    Ok(Ended {
        stdout: text(stdout),
        stderr: text(stderr),
        status,
        took: begun.elapsed(),
    })
}

/// Waits for the end of a process. `None`: it has not come at the deadline.
///
/// # Errors
/// The system does not know the process.
pub(super) fn wait(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Ends a process that may have ended by itself. `None`: not even a kill ends it.
///
/// # Errors
/// The system does not know the process.
pub(super) fn kill(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    // An error says that it has ended.
    let _ = child.kill();
    wait(child, Instant::now() + END_WITHIN)
}

/// What a process writes to a pipe, read by a thread, so that a full pipe stops nobody.
struct Output {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: thread::JoinHandle<()>,
}

impl Output {
    fn of(from: impl Read + Send + 'static) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let into = bytes.clone();
        let reader = thread::spawn(move || collect(from, &into));
        Self { bytes, reader }
    }

    /// What has been read. The thread is given up if somebody else holds the pipe.
    fn text(self) -> String {
        let deadline = Instant::now() + OUTPUT_WITHIN;
        while !self.reader.is_finished() && Instant::now() < deadline {
            thread::sleep(LOOK_EVERY);
        }
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }
}

fn collect(mut from: impl Read, into: &Mutex<Vec<u8>>) {
    let mut piece = [0_u8; PIECE_BYTES];
    loop {
        match from.read(&mut piece) {
            Ok(0) => return,
            Ok(count) => {
                let mut bytes = into.lock().unwrap_or_else(PoisonError::into_inner);
                if bytes.len() + count <= OUTPUT_BYTES_MAX {
                    bytes.extend_from_slice(&piece[..count]);
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // What was read before is shown.
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_process_that_ends_gives_its_words_and_its_status() {
        let ended = run(shell("echo right; echo wrong >&2; exit 3"), Duration::from_secs(30)).expect("a shell");
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("right", "wrong"));
        assert_eq!(ended.status.and_then(|status| status.code()), Some(3));
    }

    /// What it said before is there, and what it left behind holds nobody up.
    #[test]
    fn a_process_that_hangs_is_killed_at_its_deadline() {
        let begun = Instant::now();
        let ended = run(shell("echo first; sleep 20"), Duration::from_secs(1)).expect("a shell");
        assert_eq!(ended.status, None);
        assert_eq!(ended.stdout, "first");
        assert!(begun.elapsed() < Duration::from_secs(15));
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_with_its_name() {
        let error = run(Command::new("/no/such/program"), Duration::from_secs(1)).expect_err("no program");
        assert!(format!("{error:#}").contains("/no/such/program"));
    }
}
