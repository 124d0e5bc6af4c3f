//! One process of the cluster: started with pipes on all three streams, watched until it has exited.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use service_runtime::announce::{Announcement, Listening};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::options::{ClusterEvent, LocalClusterOptions, ProcessSpec};

/// Enough lines for a panic with its notes.
const LAST_LINES_MAX: usize = 20;
/// A longer line is cut, so that the buffer stays small.
const LINE_BYTES_MAX: usize = 4096;
/// After the exit the pipe still holds the last lines. A grandchild that inherited the pipe must not delay us.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(1);

/// The state of a process so far.
#[derive(Clone, Debug, Default)]
pub(super) struct ProcessState {
    pub listening: Option<Listening>,
    pub is_ready: bool,
    pub exit: Option<ExitStatus>,
}

#[derive(Debug)]
pub(super) struct Process {
    pub spec: ProcessSpec,
    pub pid: u32,
    pub state: watch::Receiver<ProcessState>,
    stdin: Mutex<Option<ChildStdin>>,
    kill: CancellationToken,
    last_lines: Arc<Mutex<VecDeque<String>>>,
}

impl Process {
    /// Starts the process. Its name is sent to `exits` once it has exited and its last lines are read.
    pub fn start(
        spec: ProcessSpec,
        options: &LocalClusterOptions,
        exits: mpsc::Sender<String>,
    ) -> anyhow::Result<Process> {
        let log = match &options.log_dir {
            Some(dir) => {
                let path = dir.join(format!("{}.log", spec.name));
                Some(File::create(&path).with_context(|| format!("cannot write the log file {}", path.display()))?)
            }
            None => None,
        };
        let mut child = Command::new(&options.executable)
            .args(&spec.arguments)
            .envs(options.environment.iter().cloned())
            .envs(options.direct_secret.variable(spec.kind, &options.environment))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A process group of its own: Ctrl-C at the terminal reaches the launcher only, which then drains in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {} ({})", spec.name, options.executable.display()))?;
        let pid = child.id().context("the process was gone before it could be watched")?;
        let (state, watched) = watch::channel(ProcessState::default());
        let process = Process {
            stdin: Mutex::new(child.stdin.take()),
            kill: CancellationToken::new(),
            last_lines: Arc::default(),
            state: watched,
            spec,
            pid,
        };
        let (name, kind) = (process.spec.name.clone(), process.spec.kind);
        options.observer.tell(&ClusterEvent::Started {
            name: name.clone(),
            kind,
            pid,
        });
        let streams = Streams {
            name,
            log,
            observer: options.observer.clone(),
            last_lines: Arc::clone(&process.last_lines),
        };
        let orders = Orders {
            kill: process.kill.clone(),
            exits,
        };
        tokio::spawn(watch_over(child, streams, state, orders));
        Ok(process)
    }

    /// Asks it to drain, by ending its stdin.
    pub fn drain(&self) {
        drop(self.stdin.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Sends SIGKILL.
    pub fn kill(&self) {
        self.kill.cancel();
    }

    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.state.borrow().exit
    }

    pub async fn wait_for_exit(&self) {
        let mut state = self.state.clone();
        // The sender is dropped only after the exit was published.
        let _ = state.wait_for(|state| state.exit.is_some()).await;
    }

    pub fn last_lines(&self) -> Vec<String> {
        let lines = self.last_lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().cloned().collect()
    }
}

/// What the readers of one process's output need.
struct Streams {
    name: String,
    log: Option<File>,
    observer: super::options::Observer,
    last_lines: Arc<Mutex<VecDeque<String>>>,
}

/// The channel that tells the watcher of a process to end it, and the channel that reports the end.
struct Orders {
    kill: CancellationToken,
    exits: mpsc::Sender<String>,
}

async fn watch_over(mut child: Child, streams: Streams, state: watch::Sender<ProcessState>, orders: Orders) {
    let name = streams.name.clone();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let state = Arc::new(state);
    let announcements = tokio::spawn(read_stdout(
        stdout,
        Arc::clone(&state),
        name.clone(),
        streams.observer.clone(),
    ));
    let last_words = tokio::spawn(read_stderr(stderr, streams));
    let exit = tokio::select! {
        exit = child.wait() => exit,
        () = orders.kill.cancelled() => {
            // The process may have exited in between, which is as good.
            let _ = child.start_kill();
            child.wait().await
        }
    };
    let readers = async { tokio::join!(announcements, last_words) };
    let _ = tokio::time::timeout(LAST_WORDS_WITHIN, readers).await;
    if let Ok(exit) = exit {
        state.send_modify(|state| state.exit = Some(exit));
    }
    let _ = orders.exits.send(name).await;
}

async fn read_stdout(
    stdout: Option<impl AsyncRead + Unpin>,
    state: Arc<watch::Sender<ProcessState>>,
    name: String,
    observer: super::options::Observer,
) {
    let Some(stdout) = stdout else { return };
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str::<Announcement>(&line) {
            Ok(Announcement::Listening(listening)) => {
                let address = listening
                    .http
                    .clone()
                    .or_else(|| listening.address.clone())
                    .unwrap_or_default();
                observer.tell(&ClusterEvent::Listening {
                    name: name.clone(),
                    address,
                });
                state.send_modify(|state| state.listening = Some(listening));
            }
            Ok(Announcement::Ready { .. }) => {
                observer.tell(&ClusterEvent::Ready { name: name.clone() });
                state.send_modify(|state| state.is_ready = true);
            }
            Err(_) => observer.tell(&ClusterEvent::Line {
                name: name.clone(),
                line,
            }),
        }
    }
}

async fn read_stderr(stderr: Option<impl AsyncRead + Unpin>, mut streams: Streams) {
    let Some(stderr) = stderr else { return };
    let mut lines = BufReader::new(stderr).lines();
    while let Ok(Some(mut line)) = lines.next_line().await {
        if let Some(log) = &mut streams.log {
            // A full disk must not stop the cluster. The buffer and the terminal still have the line.
            let _ = writeln!(log, "{line}");
        }
        let end = (0..=LINE_BYTES_MAX.min(line.len()))
            .rev()
            .find(|end| line.is_char_boundary(*end));
        line.truncate(end.unwrap_or(0));
        {
            let mut last = streams.last_lines.lock().unwrap_or_else(PoisonError::into_inner);
            if last.len() == LAST_LINES_MAX {
                last.pop_front();
            }
            last.push_back(line.clone());
        }
        streams.observer.tell(&ClusterEvent::Line {
            name: streams.name.clone(),
            line,
        });
    }
}
