//! Keeps every event and action of the brain in a bounded file, for `baton replay`. The loop only encodes; a thread writes.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Deref;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use serde::{Serialize, Serializer};
use service_runtime::clock::Clock;
use service_runtime::config::ByteSize;
use serving_core::cluster::{Cluster, ClusterAction, ClusterConfig, ClusterEvent};
use serving_core::ids::RequestId;
use serving_core::time::Time;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use workload::flight_record::{
    Batch, EndMark, EndReason, EntryEncoder, Header, MAGIC, Note, end_mark, file_start, frame_of,
};

use crate::token_stream::RequestStream;

/// Entries are handed to the writer when they have so many bytes, or at the first event after so much time. Nodes report several times
/// a second.
const BATCH_BYTES: usize = 64 << 10;
const BATCH_TIME: Duration = Duration::from_millis(250);
/// Batches that wait for the disk: about 4 MiB. A full queue ends the record, and never makes the loop wait.
const QUEUE_BATCHES: usize = 64;
/// Room for some 100,000 requests with prompts of 500 tokens: each takes about 2.6 KB, the reports of its nodes included.
const BYTES_MAX: ByteSize = ByteSize::mib(256);
/// The header must fit, and a record that holds nothing helps nobody.
const BYTES_MAX_MIN: u64 = 64 << 10;
/// How often the mark's count of lost events is brought up to date.
const MARK_INTERVAL: Duration = Duration::from_secs(1);

/// Where the record goes, and how large it may become: `PATH` or `PATH:SIZE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlightRecordTarget {
    path: PathBuf,
    bytes_max: ByteSize,
}

impl FlightRecordTarget {
    /// A file of its own for one of several coordinators that were given the same path.
    pub fn of_process(&self, name: &str) -> Self {
        let mut path = self.path.clone().into_os_string();
        path.push(format!(".{name}"));
        Self {
            path: path.into(),
            bytes_max: self.bytes_max,
        }
    }
}

impl FromStr for FlightRecordTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let sized = text.rsplit_once(':');
        let sized = sized.and_then(|(path, size)| Some((path, size.parse::<ByteSize>().ok()?)));
        let (path, bytes_max) = sized.unwrap_or((text, BYTES_MAX));
        if path.is_empty() {
            return Err("write a file, or FILE:SIZE such as flight.record:64MiB".to_owned());
        }
        if bytes_max.bytes() < BYTES_MAX_MIN {
            return Err(format!(
                "a flight record of {bytes_max} holds next to nothing: give it 64KiB or more"
            ));
        }
        let path = PathBuf::from(path);
        Ok(Self { path, bytes_max })
    }
}

impl fmt::Display for FlightRecordTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.bytes_max)
    }
}

impl Serialize for FlightRecordTarget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What a record begins with.
#[derive(Clone, Debug)]
pub(crate) struct RecordStart<'a> {
    pub target: &'a FlightRecordTarget,
    pub coordinator: &'a str,
    pub cluster: ClusterConfig,
}

/// What the loop and the writer tell each other beside the batches.
#[derive(Debug, Default)]
struct Shared {
    /// Set by the writer: nothing more is written.
    has_ended: AtomicBool,
    /// Set by the loop: a batch found the queue full, so there is a gap, and a replay cannot go beyond it.
    has_gap: AtomicBool,
    lost_events: AtomicU64,
}

/// The brain of the loop, and the recorder, if there is one.
#[derive(Debug)]
pub(crate) struct RecordedCluster {
    cluster: Cluster,
    recorder: Option<FlightRecorder>,
}

impl RecordedCluster {
    pub(crate) fn new(config: ClusterConfig, recorder: Option<FlightRecorder>) -> Self {
        Self {
            cluster: Cluster::new(config),
            recorder,
        }
    }

    pub(crate) fn apply(&mut self, now: Time, event: ClusterEvent) -> Vec<ClusterAction> {
        match &mut self.recorder {
            Some(recorder) => recorder.apply(&mut self.cluster, now, event),
            None => self.cluster.apply(now, event),
        }
    }

    /// The request has ended.
    pub(crate) fn note_delivered(&mut self, request: RequestId, stream: &RequestStream) {
        if let Some(recorder) = &mut self.recorder {
            recorder.note_delivered(request, stream.delivered_tokens());
        }
    }
}

impl Deref for RecordedCluster {
    type Target = Cluster;
    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

/// The loop's end.
#[derive(Debug)]
pub(crate) struct FlightRecorder {
    encoder: EntryEncoder,
    to_writer: SyncSender<Batch>,
    shared: Arc<Shared>,
    flushed_at: Time,
}

impl FlightRecorder {
    /// Also returns a task that ends when the file is complete, after the recorder was dropped.
    pub(crate) fn start(start: RecordStart) -> anyhow::Result<(Self, JoinHandle<()>)> {
        let (file, bytes) = create(&start)?;
        let (to_writer, batches) = sync_channel(QUEUE_BATCHES);
        let shared = Arc::new(Shared::default());
        let mut writer = Writer {
            file,
            bytes,
            bytes_max: start.target.bytes_max.bytes(),
            shared: shared.clone(),
            mark: None,
        };
        let (done, is_done) = oneshot::channel();
        let path = start.target.path.clone();
        let thread = move || {
            if let Err(error) = writer.run(&batches) {
                writer.shared.has_ended.store(true, Ordering::Relaxed);
                tracing::error!(path = %path.display(), %error, "the flight record cannot be written and ends here; requests are served as before");
            }
            // Nobody waits when the coordinator was not stopped in order.
            let _ = done.send(());
        };
        std::thread::Builder::new()
            .name("flight-record".to_owned())
            .spawn(thread)
            .context("no thread for it")?;
        let recorder = Self {
            encoder: EntryEncoder::default(),
            to_writer,
            shared,
            flushed_at: Time::ZERO,
        };
        let complete = tokio::spawn(async move {
            let _ = is_done.await;
        });
        Ok((recorder, complete))
    }

    fn is_recording(&self) -> bool {
        !self.shared.has_ended.load(Ordering::Relaxed) && !self.shared.has_gap.load(Ordering::Relaxed)
    }

    /// Gives the event to the brain, and keeps both the event and the answer.
    fn apply(&mut self, cluster: &mut Cluster, now: Time, event: ClusterEvent) -> Vec<ClusterAction> {
        if !self.is_recording() {
            self.shared.lost_events.fetch_add(1, Ordering::Relaxed);
            return cluster.apply(now, event);
        }
        self.encoder.begin(now, &event);
        let actions = cluster.apply(now, event);
        if self.encoder.finish(cluster.looked_up(), &actions).is_err() {
            self.lose(1);
        }
        if self.encoder.waiting_bytes() >= BATCH_BYTES || now.since(self.flushed_at) >= BATCH_TIME {
            self.flushed_at = now;
            self.flush();
        }
        actions
    }

    fn note_delivered(&mut self, request: RequestId, output_tokens: u64) {
        if self.is_recording() {
            self.encoder
                .note(Clock::now(), &Note::Delivered { request, output_tokens });
        }
    }

    /// Never waits.
    fn flush(&mut self) {
        if self.encoder.waiting_bytes() == 0 {
            return;
        }
        if let Err(TrySendError::Full(batch) | TrySendError::Disconnected(batch)) =
            self.to_writer.try_send(self.encoder.take())
        {
            self.lose(batch.events);
        }
    }

    fn lose(&mut self, events: u64) {
        self.shared.lost_events.fetch_add(events, Ordering::Relaxed);
        self.shared.has_gap.store(true, Ordering::Relaxed);
    }
}

impl Drop for FlightRecorder {
    /// The writer ends when the sender is gone.
    fn drop(&mut self) {
        self.flush();
    }
}

/// A new file that begins with the header, and its length. What an earlier life wrote is kept under another name.
fn create(start: &RecordStart) -> anyhow::Result<(File, u64)> {
    let path = &start.target.path;
    keep_earlier(path)?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let header = Header {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        coordinator: start.coordinator.to_owned(),
        started_unix_ms: u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
        config: start.cluster.clone(),
    };
    let first = file_start(&header)?;
    // Names and addresses of nodes are in it: for its owner only.
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot make {}", path.display()))?;
    file.write_all(&first)?;
    Ok((file, first.len() as u64))
}

fn keep_earlier(path: &Path) -> anyhow::Result<()> {
    let mut earlier = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened.with_context(|| format!("cannot read {}", path.display()))?,
    };
    // What a coordinator leaves that dies before it has written anything.
    if earlier.metadata().is_ok_and(|file| file.is_file() && file.len() == 0) {
        return std::fs::remove_file(path).with_context(|| format!("cannot remove the empty {}", path.display()));
    }
    let mut start = [0; MAGIC.len()];
    let is_record = earlier.read_exact(&mut start).is_ok() && start == *MAGIC;
    ensure!(
        is_record,
        "{} exists and is no flight record: give another file",
        path.display()
    );
    let mut kept = path.as_os_str().to_owned();
    kept.push(".1");
    std::fs::rename(path, &kept).with_context(|| format!("cannot rename it to {}", Path::new(&kept).display()))
}

/// The thread's end.
#[derive(Debug)]
struct Writer {
    file: File,
    bytes: u64,
    bytes_max: u64,
    shared: Arc<Shared>,
    mark: Option<WrittenMark>,
}

#[derive(Clone, Copy, Debug)]
struct WrittenMark {
    mark: EndMark,
    at_byte: u64,
}

impl Writer {
    fn run(&mut self, batches: &Receiver<Batch>) -> io::Result<()> {
        loop {
            match batches.recv_timeout(MARK_INTERVAL) {
                Ok(batch) => self.write(&batch)?,
                Err(RecvTimeoutError::Timeout) if self.shared.has_gap.load(Ordering::Relaxed) => {
                    self.mark(EndReason::QueueFull)?;
                }
                // The reason stays that of the first mark.
                Err(RecvTimeoutError::Timeout) if self.mark.is_some() => self.mark(EndReason::SizeBound)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let has_gap = self.shared.has_gap.load(Ordering::Relaxed);
                    self.mark(if has_gap {
                        EndReason::QueueFull
                    } else {
                        EndReason::Stopped
                    })?;
                    return self.file.sync_all();
                }
            }
        }
    }

    fn write(&mut self, batch: &Batch) -> io::Result<()> {
        let frame = frame_of(batch);
        let mark_bytes = end_mark(EndMark {
            reason: EndReason::SizeBound,
            lost_events: 0,
        })
        .len();
        let with_frame = self.bytes + (frame.len() + mark_bytes) as u64;
        if self.mark.is_some() || with_frame > self.bytes_max {
            if !self.shared.has_ended.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    bytes = self.bytes,
                    "the flight record has reached its size and ends here; a new life of the coordinator begins a new one"
                );
            }
            self.shared.lost_events.fetch_add(batch.events, Ordering::Relaxed);
            return self.mark(EndReason::SizeBound);
        }
        self.file.write_all(&frame)?;
        self.bytes += frame.len() as u64;
        Ok(())
    }

    /// Writes the mark, or writes it again when more events were lost since.
    fn mark(&mut self, reason: EndReason) -> io::Result<()> {
        let lost_events = self.shared.lost_events.load(Ordering::Relaxed);
        let at_byte = self.mark.map_or(self.bytes, |written| written.at_byte);
        let reason = self.mark.map_or(reason, |written| written.mark.reason);
        let mark = EndMark { reason, lost_events };
        if self.mark.is_some_and(|written| written.mark == mark) {
            return Ok(());
        }
        self.file.seek(SeekFrom::Start(at_byte))?;
        self.file.write_all(&end_mark(mark))?;
        self.mark = Some(WrittenMark { mark, at_byte });
        Ok(())
    }
}

#[cfg(test)]
#[path = "flight_recorder_tests.rs"]
mod tests;
