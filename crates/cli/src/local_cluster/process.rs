//! One process of the cluster: started with pipes on all three streams, watched until it has exited.

use std::collections::VecDeque;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use rustix::thread::{CpuSet, sched_setaffinity};
use service_runtime::announce::{Announcement, Listening};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::NodeExit;
use super::events::{ClusterEvent, Observer};
use super::log_file::{self, LogFile};
use super::options::LocalClusterOptions;
use super::specs::ProcessSpec;

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
    /// The launcher killed it: it had not ended by itself.
    pub is_killed: bool,
}

#[derive(Debug)]
pub(super) struct Process {
    pub spec: ProcessSpec,
    pub pid: u32,
    pub state: watch::Receiver<ProcessState>,
    stdin: Mutex<Option<ChildStdin>>,
    kill: CancellationToken,
    last_lines: Arc<LastLines>,
}

type LastLines = Mutex<VecDeque<String>>;

/// The task that reads a process's output and waits for its end.
#[derive(Debug)]
struct Watcher {
    name: String,
    log: Option<Mutex<LogFile>>,
    observer: Observer,
    last_lines: Arc<LastLines>,
    state: watch::Sender<ProcessState>,
    /// Ends the process.
    kill: CancellationToken,
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
                let file = LogFile::create(dir, &spec.name, options.log_bytes_max);
                let path = log_file::path(dir, &spec.name);
                Some(file.with_context(|| format!("cannot write the log file {}", path.display()))?)
            }
            None => None,
        };
        let mut command = Command::new(&options.executable);
        command
            .args(&spec.arguments)
            .envs(options.environment.iter().cloned())
            .envs(options.variables(spec.kind))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A process group of its own: Ctrl-C at the terminal reaches the launcher only, which then drains in order.
            .process_group(0)
            .kill_on_drop(true);
        let cores = options.cores_by_name.get(&spec.name).map(Vec::as_slice);
        let mut child = spawn_on(&mut command, cores)
            .with_context(|| format!("cannot start {} ({})", spec.name, options.executable.display()))?;
        let pid = child.id().context("the process was gone before it could be watched")?;
        let (state, watched) = watch::channel(ProcessState::default());
        options.observer.tell(&ClusterEvent::Started {
            name: spec.name.clone(),
            kind: spec.kind,
            pid,
        });
        let watcher = Arc::new(Watcher {
            name: spec.name.clone(),
            log: log.map(Mutex::new),
            observer: options.observer.clone(),
            last_lines: Arc::default(),
            state,
            kill: CancellationToken::new(),
        });
        let process = Process {
            spec,
            pid,
            state: watched,
            stdin: Mutex::new(child.stdin.take()),
            kill: watcher.kill.clone(),
            last_lines: Arc::clone(&watcher.last_lines),
        };
        tokio::spawn(watcher.watch_over(child, exits));
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

    /// `None` while it runs.
    pub fn exit(&self) -> Option<NodeExit> {
        Some(NodeExit {
            name: self.spec.name.clone(),
            kind: self.spec.kind,
            pid: self.pid,
            status: self.exit_status()?,
            is_killed: self.state.borrow().is_killed,
            last_lines: locked(&self.last_lines).iter().cloned().collect(),
        })
    }
}

/// A process inherits the cores of the thread that starts it. So a thread of its own narrows itself down and starts the process;
/// nothing has to run between fork and exec, where almost nothing may.
fn spawn_on(command: &mut Command, cores: Option<&[u32]>) -> anyhow::Result<Child> {
    let Some(cores) = cores else {
        return Ok(command.spawn()?);
    };
    let mut set = CpuSet::new();
    for core in cores {
        let core = *core as usize;
        anyhow::ensure!(core < CpuSet::MAX_CPU, "there is no core {core}");
        set.set(core);
    }
    let runtime = tokio::runtime::Handle::current();
    std::thread::scope(|threads| {
        let started = threads.spawn(|| {
            sched_setaffinity(None, &set).with_context(|| format!("cannot use the cores {cores:?}"))?;
            let _guard = runtime.enter();
            Ok(command.spawn()?)
        });
        started
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread that starts it panicked")))
    })
}

impl Watcher {
    async fn watch_over(self: Arc<Self>, mut child: Child, exits: mpsc::Sender<String>) {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let reader = Arc::clone(&self);
        let readers = tokio::spawn(async move { tokio::join!(reader.read_stdout(stdout), reader.read_stderr(stderr)) });
        let exit = tokio::select! {
            exit = child.wait() => exit,
            () = self.kill.cancelled() => {
                // It may have ended in between, and nobody has looked yet.
                if !matches!(child.try_wait(), Ok(Some(_))) {
                    self.state.send_modify(|state| state.is_killed = true);
                    let _ = child.start_kill();
                }
                child.wait().await
            }
        };
        let _ = tokio::time::timeout(LAST_WORDS_WITHIN, readers).await;
        if let Ok(exit) = exit {
            self.state.send_modify(|state| state.exit = Some(exit));
        }
        let _ = exits.send(self.name.clone()).await;
    }

    async fn read_stdout(&self, stdout: Option<impl AsyncRead + Unpin>) {
        let Some(stdout) = stdout else { return };
        let mut stdout = BufReader::new(stdout);
        while let Some(line) = next_line(&mut stdout).await {
            let name = self.name.clone();
            match serde_json::from_str::<Announcement>(&line) {
                Ok(Announcement::Listening(listening)) => {
                    let address = listening.http.as_ref().or(listening.address.as_ref());
                    let address = address.cloned().unwrap_or_default();
                    self.observer.tell(&ClusterEvent::Listening { name, address });
                    self.state.send_modify(|state| state.listening = Some(listening));
                }
                Ok(Announcement::Packing {
                    done_bytes,
                    total_bytes,
                    ..
                }) => self.observer.tell(&ClusterEvent::Packing {
                    name,
                    done_bytes,
                    total_bytes,
                }),
                Ok(Announcement::Ready { .. }) => {
                    self.observer.tell(&ClusterEvent::Ready { name });
                    self.state.send_modify(|state| state.is_ready = true);
                }
                Err(_) => self.observer.tell(&ClusterEvent::Line { name, line }),
            }
        }
    }

    async fn read_stderr(&self, stderr: Option<impl AsyncRead + Unpin>) {
        let Some(stderr) = stderr else { return };
        let mut stderr = BufReader::new(stderr);
        while let Some(mut line) = next_line(&mut stderr).await {
            if let Some(log) = &self.log {
                log.lock().unwrap_or_else(PoisonError::into_inner).add(&line);
            }
            line.truncate(line.floor_char_boundary(LINE_BYTES_MAX));
            {
                let mut last = locked(&self.last_lines);
                if last.len() == LAST_LINES_MAX {
                    last.pop_front();
                }
                last.push_back(line.clone());
            }
            let name = self.name.clone();
            self.observer.tell(&ClusterEvent::Line { name, line });
        }
    }
}

/// The next line, without its end. What is not UTF-8 is replaced, because a library may print anything, and the later lines must not
/// be lost. `None`: the stream has ended, or it cannot be read.
async fn next_line(stream: &mut (impl AsyncBufRead + Unpin)) -> Option<String> {
    let mut bytes = Vec::new();
    if stream.read_until(b'\n', &mut bytes).await.ok()? == 0 {
        return None;
    }
    let line = bytes.strip_suffix(b"\n").unwrap_or(bytes.as_slice());
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    Some(String::from_utf8_lossy(line).into_owned())
}

fn locked(last_lines: &LastLines) -> MutexGuard<'_, VecDeque<String>> {
    last_lines.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_line_that_is_no_text_does_not_end_the_log() {
        let (state, _watched) = watch::channel(ProcessState::default());
        let watcher = Watcher {
            name: "decode-0".to_owned(),
            log: None,
            observer: Observer::default(),
            last_lines: Arc::default(),
            state,
            kill: CancellationToken::new(),
        };
        let said = b"first\n\xff\xfe\r\n\nlast";
        watcher.read_stderr(Some(said.as_slice())).await;
        let lines: Vec<String> = locked(&watcher.last_lines).iter().cloned().collect();
        assert_eq!(lines, ["first", "\u{fffd}\u{fffd}", "", "last"]);
    }
}
