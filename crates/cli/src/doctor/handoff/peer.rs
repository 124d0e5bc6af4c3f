//! The other process: this program again, which is told by words what to do. Both sides of the talk are here.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};

use crate::doctor::child;

/// Lines without it are those of a library.
const MARK: &str = "baton-doctor ";
/// It is told one thing at a time, and answers with one word.
const WORDS_MAX: usize = 4;
const READY: &str = "ready";
/// A process that has failed says so before it ends.
const LAST_WORD_WITHIN: Duration = Duration::from_secs(1);
/// From the end of the talk to that of the process.
const END_WITHIN: Duration = Duration::from_secs(30);

/// The other process, as this one sees it. It is killed when this value is dropped.
#[derive(Debug)]
pub(super) struct Peer {
    child: Child,
    /// `None`: nothing is told any more.
    to: Option<ChildStdin>,
    words: Receiver<String>,
}

impl Peer {
    /// Starts it and waits until it is ready.
    ///
    /// # Errors
    /// It does not start, or is not ready in time.
    pub fn start(mut command: Command, within: Duration) -> anyhow::Result<Self> {
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.context("cannot start the other process")?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let (put, words) = sync_channel(WORDS_MAX);
        thread::spawn(move || {
            let lines = from.into_iter().flat_map(|from| BufReader::new(from).lines());
            for line in lines.map_while(Result::ok) {
                if let Some(word) = line.strip_prefix(MARK)
                    && put.send(word.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let peer = Self { child, to, words };
        peer.expect(READY, within)?;
        Ok(peer)
    }

    /// # Errors
    /// It has ended.
    pub fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        let to = self
            .to
            .as_mut()
            .context("the other process is not told anything any more")?;
        writeln!(to, "{line}")
            .and_then(|()| to.flush())
            .context("the other process has ended")
    }

    /// # Errors
    /// It says another word, which tells what went wrong, or nothing.
    pub fn expect(&self, word: &str, within: Duration) -> anyhow::Result<()> {
        match self.words.recv_timeout(within) {
            Ok(said) if said == word => Ok(()),
            Ok(said) => bail!("the other process: {said}"),
            Err(RecvTimeoutError::Timeout) => {
                bail!("the other process did not say `{word}` within {} s", within.as_secs())
            }
            Err(RecvTimeoutError::Disconnected) => bail!("the other process ended before it said `{word}`"),
        }
    }

    /// Adds what the other process says next to an error of this one: it may know the reason.
    pub fn beside(&self, error: anyhow::Error) -> anyhow::Error {
        match self.words.recv_timeout(LAST_WORD_WITHIN) {
            Ok(said) => anyhow!("{error:#}; the other process: {said}"),
            Err(_) => error,
        }
    }

    /// Ends it as a crash does. Returns the moment before.
    ///
    /// # Errors
    /// It does not end.
    pub fn kill(mut self) -> anyhow::Result<Instant> {
        let at = Instant::now();
        child::kill(&mut self.child)?.context("a process that was killed has not ended")?;
        Ok(at)
    }

    /// Tells it nothing more and waits for its end.
    ///
    /// # Errors
    /// It does not end, or ends with an error.
    pub fn end(mut self) -> anyhow::Result<()> {
        drop(self.to.take());
        let status = child::wait(&mut self.child, Instant::now() + END_WITHIN)?;
        let status = status.context("the other process does not end")?;
        ensure!(status.success(), "the other process ended with {status}");
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Mostly it has ended before. One that does not end is left alone.
        let _ = child::kill(&mut self.child);
    }
}

/// Is the other process: `open` makes what it works with, `act` does what a line says and answers with a word. It ends with the
/// talk. An error is told before it ends this process.
///
/// # Errors
/// Those of both functions.
pub(super) fn be_peer<T>(
    open: impl FnOnce() -> anyhow::Result<T>,
    act: impl FnMut(&mut T, &[&str]) -> anyhow::Result<&'static str>,
) -> anyhow::Result<()> {
    obey(open, act).inspect_err(|error| {
        // Without a listener nobody wants to know it.
        let _ = say(&format!("{error:#}"));
    })
}

fn obey<T>(
    open: impl FnOnce() -> anyhow::Result<T>,
    mut act: impl FnMut(&mut T, &[&str]) -> anyhow::Result<&'static str>,
) -> anyhow::Result<()> {
    let mut opened = open()?;
    say(READY)?;
    let mut line = String::new();
    loop {
        line.clear();
        if std::io::stdin().lock().read_line(&mut line)? == 0 {
            return Ok(());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        say(act(&mut opened, &words)?)?;
    }
}

fn say(word: &str) -> anyhow::Result<()> {
    let mut out = crate::stdout::stdout();
    writeln!(out, "{MARK}{}", word.replace('\n', " "))?;
    Ok(out.flush()?)
}

/// The bytes of a word of hexadecimal digits.
///
/// # Errors
/// It has another length or other letters.
pub(super) fn from_hex<const BYTES: usize>(word: &str) -> anyhow::Result<[u8; BYTES]> {
    ensure!(
        word.len() == 2 * BYTES && word.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "a word is no {BYTES} bytes"
    );
    let mut bytes = [0; BYTES];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&word[2 * at..2 * at + 2], 16)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use model_files::gguf::hex;

    use super::*;

    #[test]
    fn bytes_survive_the_way_as_a_word() {
        let bytes: [u8; 64] = std::array::from_fn(|at| (at * 37 % 256) as u8);
        assert_eq!(from_hex::<64>(&hex(&bytes)).expect("its bytes"), bytes);
        for bad in ["", "0", "zz", "+1"] {
            assert!(from_hex::<1>(bad).is_err(), "{bad}");
        }
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn lines_of_a_library_are_passed_over_and_other_words_are_errors() {
        let script = "echo NCCL INFO; echo baton-doctor ready; read line; echo baton-doctor it broke";
        let mut peer = Peer::start(shell(script), SOON).expect("ready");
        peer.tell("go").expect("it reads");
        let error = peer.expect("done", SOON).expect_err("another word");
        assert!(error.to_string().contains("it broke"), "{error}");
        peer.end().expect("it ends");
    }

    #[test]
    fn a_peer_that_ends_or_is_silent_is_named() {
        let ended = Peer::start(shell("exit 1"), SOON).expect_err("it has ended");
        assert!(ended.to_string().contains("ended before"), "{ended}");
        let silent = Peer::start(shell("exec sleep 60"), Duration::from_millis(50)).expect_err("it is silent");
        assert!(silent.to_string().contains("did not say"), "{silent}");
    }
}
