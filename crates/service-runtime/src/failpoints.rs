//! Named places in a request's life at which a test can cause a fault. The fault matrix uses them.
//!
//! Compiled to nothing unless the feature `failpoints` is on. With the feature each process serves a Unix socket in the
//! folder that `BATON_FAILPOINTS` names. A line `point=actions` arms a point, in the language of the `fail` crate:
//! `3*off->1*return(stop)` stops the process at the fourth passage. Actions: `sleep(MS)`; `return(stop)`, which stops the
//! whole process as SIGSTOP does until it is continued or killed, so that a test can act at exactly this point;
//! `return(fault)`, the point's own fault (see [`FaultPoint`]); `off`.

/// The variable with the folder of the sockets.
pub const FOLDER_VARIABLE: &str = "BATON_FAILPOINTS";

/// F1 to F12, in the order of a request's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultPoint {
    /// F1, coordinator: the request has arrived, and waits for a place or has just got one.
    Queued,
    /// F2, prefill node: the prompt's blocks are held.
    PrefillScheduled,
    /// F3, prefill node: before each step of the engine.
    MidChunk,
    /// F4, prefill node: the first token is drawn and not sent yet.
    PrefillDone,
    /// F5, decode node: blocks are reserved, the ticket is not sent yet.
    DecodeReserved,
    /// F6, prefill node: the first block is on its way.
    TransferBegun,
    /// F6, prefill node: half of the blocks are on their way.
    TransferHalf,
    /// F6, prefill node: every block is on its way, the last frame is not. The point's own fault: the transfer breaks here.
    TransferNearlyDone,
    /// F7, decode node: committed, the acknowledgement is not sent.
    Committed,
    /// F8, prefill node: the acknowledgement has come, the blocks are not released yet. The point's own fault: it never
    /// came.
    Acked,
    /// F9, coordinator: a first token has come, the client has not seen it.
    FirstTokenUnflushed,
    /// F10, decode node: after each step of the engine, before its tokens are sent.
    MidDecode,
    /// F11, decode node: the last token is drawn, the end is not sent.
    LastToken,
    /// F12, decode node: the end is sent.
    TerminalSent,
}

impl FaultPoint {
    pub const ALL: [Self; 14] = [
        Self::Queued,
        Self::PrefillScheduled,
        Self::MidChunk,
        Self::PrefillDone,
        Self::DecodeReserved,
        Self::TransferBegun,
        Self::TransferHalf,
        Self::TransferNearlyDone,
        Self::Committed,
        Self::Acked,
        Self::FirstTokenUnflushed,
        Self::MidDecode,
        Self::LastToken,
        Self::TerminalSent,
    ];

    /// The name in scripts and in the matrix.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::PrefillScheduled => "prefill-scheduled",
            Self::MidChunk => "mid-chunk",
            Self::PrefillDone => "prefill-done",
            Self::DecodeReserved => "decode-reserved",
            Self::TransferBegun => "transfer-begun",
            Self::TransferHalf => "transfer-half",
            Self::TransferNearlyDone => "transfer-nearly-done",
            Self::Committed => "committed",
            Self::Acked => "acked",
            Self::FirstTokenUnflushed => "first-token-unflushed",
            Self::MidDecode => "mid-decode",
            Self::LastToken => "last-token",
            Self::TerminalSent => "terminal-sent",
        }
    }

    /// The role of the process that passes the point.
    pub fn role(self) -> &'static str {
        match self {
            Self::Queued | Self::FirstTokenUnflushed => "coordinator",
            Self::PrefillScheduled
            | Self::MidChunk
            | Self::PrefillDone
            | Self::TransferBegun
            | Self::TransferHalf
            | Self::TransferNearlyDone
            | Self::Acked => "prefill",
            Self::DecodeReserved | Self::Committed | Self::MidDecode | Self::LastToken | Self::TerminalSent => "decode",
        }
    }

    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|point| point.name() == name)
    }
}

#[cfg(feature = "failpoints")]
pub use armed::{hit, serve};

/// Passes a point. Returns true when the point's own fault is to happen here.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn hit(_: FaultPoint) -> bool {
    false
}

#[cfg(feature = "failpoints")]
mod armed {
    use std::io::{self, BufRead as _, BufReader, Write as _};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use rustix::process::Signal;
    use tokio::signal::unix::{SignalKind, signal};

    use super::FaultPoint;

    /// How soon a continued process goes on from its point.
    const LOOK_EVERY: Duration = Duration::from_micros(200);

    /// A client of the socket sends its line and leaves. A client that does not is dropped after this time.
    const LINE_TIME_LIMIT: Duration = Duration::from_secs(5);

    /// Passes a point: waits, stops the process, or returns that the point's own fault is to happen here.
    pub fn hit(point: FaultPoint) -> bool {
        let told = fail::eval(point.name(), |told| told.unwrap_or_default());
        match told.as_deref() {
            Some("stop") => {
                stand_still();
                false
            }
            Some("fault") => true,
            _ => false,
        }
    }

    /// How often this process was continued.
    static CONTINUED: AtomicU64 = AtomicU64::new(0);

    /// Stops the process and returns once it was continued. The kernel stops each thread when that thread next runs, so on
    /// a busy machine the calling thread could go on for milliseconds. It therefore waits for the end of the stop.
    fn stand_still() {
        let before = CONTINUED.load(Ordering::Relaxed);
        if rustix::process::kill_process(rustix::process::getpid(), Signal::STOP).is_err() {
            return;
        }
        while CONTINUED.load(Ordering::Relaxed) == before {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Counts SIGCONT, on a thread of its own.
    fn count_continues() -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut continues = {
            let _guard = runtime.enter();
            signal(SignalKind::from_raw(Signal::CONT.as_raw()))?
        };
        let count = move || {
            runtime.block_on(async {
                while continues.recv().await.is_some() {
                    CONTINUED.fetch_add(1, Ordering::Relaxed);
                }
            });
        };
        std::thread::Builder::new().name("continues".to_owned()).spawn(count)?;
        Ok(())
    }

    /// Arms points for any client that can write to `FOLDER/NAME.sock`, on a thread of its own.
    ///
    /// # Errors
    /// No socket there.
    pub fn serve(folder: &Path, name: &str) -> io::Result<()> {
        count_continues()?;
        let path = folder.join(format!("{name}.sock"));
        // A socket of an earlier life of this process.
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(path)?;
        std::thread::Builder::new()
            .name("failpoints".to_owned())
            .spawn(move || {
                for stream in listener.incoming().flatten() {
                    if let Err(error) = take(stream) {
                        tracing::warn!(%error, "a line for the failpoints was lost");
                    }
                }
            })?;
        Ok(())
    }

    fn take(mut stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(LINE_TIME_LIMIT))?;
        let mut line = String::new();
        BufReader::new(stream.try_clone()?).read_line(&mut line)?;
        let answer = match arm(line.trim()) {
            Ok(()) => "ok\n".to_owned(),
            Err(error) => format!("{error}\n"),
        };
        stream.write_all(answer.as_bytes())
    }

    fn arm(line: &str) -> Result<(), String> {
        let (name, actions) = line.split_once('=').ok_or("expected point=actions")?;
        let point = FaultPoint::of_name(name).ok_or_else(|| format!("no failpoint is called {name}"))?;
        fail::cfg(point.name(), actions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<&str> = FaultPoint::ALL.iter().map(|point| point.name()).collect();
        assert_eq!(names.len(), FaultPoint::ALL.len());
        for point in FaultPoint::ALL {
            assert_eq!(FaultPoint::of_name(point.name()), Some(point));
        }
    }
}
