//! Frames on their way into one stream: a queue with a limit in bytes, and a clock for the time that each frame was moving.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::Stream;
use proto::messages::KvFrame;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::shm::Slot;

/// Frames that are queued beside the byte limit: begins, lasts and aborts are small, but not free.
pub(crate) const FRAMES_QUEUED_MAX: usize = 1024;

/// Changes outgoing frames, for faults in the conformance suite. The frames that it returns are sent instead.
pub(crate) trait FrameTap: Send + Sync + Debug {
    fn pass(&self, frame: KvFrame) -> Vec<KvFrame>;
}

/// One frame and the values that belong to it.
#[derive(Debug)]
pub(crate) struct Queued {
    pub frame: KvFrame,
    pub queued_at: Instant,
    /// KV bytes and their share of the byte limit. It is given back when the frame is taken or dropped.
    pub room: Option<Room>,
    /// The place of bytes that are not in the frame.
    pub slot: Option<Slot>,
    /// Where the transfer adds up its moving time.
    pub moving: Option<Arc<AtomicU64>>,
    /// Told when the frame is taken.
    pub written: Option<oneshot::Sender<Instant>>,
}

impl Queued {
    pub fn control(frame: KvFrame) -> Self {
        Self {
            frame,
            queued_at: Instant::now(),
            room: None,
            slot: None,
            moving: None,
            written: None,
        }
    }
}

/// KV bytes that wait on a stream. However they leave the queue, they no longer wait.
#[derive(Debug)]
pub(crate) struct Room {
    pub bytes: u64,
    gauge: Arc<Gauge>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Room {
    pub fn take(bytes: u64, gauge: &Arc<Gauge>, permit: Option<OwnedSemaphorePermit>) -> Self {
        gauge.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        Self {
            bytes,
            gauge: gauge.clone(),
            _permit: permit,
        }
    }
    pub fn gauge(&self) -> Arc<Gauge> {
        self.gauge.clone()
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.gauge.waiting_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Buffers of frames that were written, for the next frames of any pair: they are warm and were zeroed only once.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

/// As many bytes as one pair may have in flight by default. More bytes lie between a copy and the connection only when
/// several pairs are at their limits. With 16 kept buffers, the rest of the 32 buffers of a 512-token prompt were zeroed
/// again each time.
const BUFFER_BYTES_KEPT_MAX: usize = 32 << 20;

impl Buffers {
    /// The content is what the last user left.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Buffer {
        let mut buffer = {
            let mut kept = self.kept();
            let buffer = kept.buffers.pop().unwrap_or_default();
            kept.bytes -= buffer.len();
            buffer
        };
        buffer.resize(bytes, 0);
        Buffer {
            bytes: buffer,
            home: self.clone(),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub bytes: Vec<u8>,
    home: Arc<Buffers>,
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut kept = self.home.kept();
        if kept.bytes + self.bytes.len() <= BUFFER_BYTES_KEPT_MAX {
            kept.bytes += self.bytes.len();
            kept.buffers.push(std::mem::take(&mut self.bytes));
        }
    }
}

/// Bytes that wait and bytes that were sent. The stall watch reads both.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    pub waiting_bytes: AtomicU64,
    pub taken_bytes: AtomicU64,
}

/// The stream from which the connection takes frames. The connection takes a frame only when it can write, so a taken frame
/// counts as written.
#[derive(Debug)]
pub(crate) struct Outgoing {
    queue: mpsc::Receiver<Queued>,
    gauge: Arc<Gauge>,
    pace: Pace,
    tap: Option<Arc<dyn FrameTap>>,
    tapped: VecDeque<KvFrame>,
}

impl Outgoing {
    pub fn new(queue: mpsc::Receiver<Queued>, gauge: Arc<Gauge>, tap: Option<Arc<dyn FrameTap>>) -> Self {
        Self {
            queue,
            gauge,
            pace: Pace::default(),
            tap,
            tapped: VecDeque::new(),
        }
    }

    fn taken(&mut self, queued: Queued) -> KvFrame {
        let now = Instant::now();
        if let Some(room) = &queued.room {
            self.gauge.taken_bytes.fetch_add(room.bytes, Ordering::Relaxed);
        }
        if let Some(moving) = &queued.moving {
            self.pace.moved(moving, queued.queued_at, now);
        }
        if let Some(written) = queued.written {
            let _ = written.send(now);
        }
        queued.frame
    }
}

/// Reports how long each frame was moving. The queue is first in, first out; the time counts from when the frame came to
/// the front.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    last: Option<Instant>,
}

impl Pace {
    pub fn moved(&mut self, moving: &AtomicU64, queued_at: Instant, now: Instant) {
        let came_up = self.last.map_or(queued_at, |last| last.max(queued_at));
        self.last = Some(now);
        moving.fetch_add(nanos(now.saturating_duration_since(came_up)), Ordering::Relaxed);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Stream for Outgoing {
    type Item = KvFrame;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(frame) = self.tapped.pop_front() {
                return Poll::Ready(Some(frame));
            }
            let Some(queued) = std::task::ready!(self.queue.poll_recv(context)) else {
                return Poll::Ready(None);
            };
            let frame = self.taken(queued);
            match &self.tap {
                None => return Poll::Ready(Some(frame)),
                Some(tap) => self.tapped = tap.pass(frame).into(),
            }
        }
    }
}
