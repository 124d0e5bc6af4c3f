//! Frames on their way into one stream: the queue that a transport empties, and a clock for the time that each frame was moving.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::Stream;
use proto::messages::KvFrame;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Place;

/// Frames that are queued beside the byte limit: begins, lasts and aborts are small, but not free.
const FRAMES_QUEUED_MAX: usize = 1024;

/// The pair's end of a link's queue.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    pub frames: mpsc::Sender<Queued>,
    pub gauge: Arc<Gauge>,
    /// The transport ends the stream when it is cancelled.
    pub over: CancellationToken,
}

impl Outbox {
    /// With the queue that the transport empties.
    pub fn new() -> (Self, mpsc::Receiver<Queued>) {
        let (frames, queue) = mpsc::channel(FRAMES_QUEUED_MAX);
        let (gauge, over) = Default::default();
        (Self { frames, gauge, over }, queue)
    }
}

/// One frame and the values that belong to it.
#[derive(Debug)]
pub(crate) struct Queued {
    pub frame: KvFrame,
    pub queued_at: Instant,
    pub kv: Option<QueuedKv>,
    /// Told when the frame is taken.
    pub written: Option<oneshot::Sender<Instant>>,
}

/// The KV of a frame. However it leaves the queue, its bytes no longer wait and its place is free.
#[derive(Debug)]
pub(crate) struct QueuedKv {
    pub place: Box<dyn Place>,
    pub bytes: u64,
    gauge: Arc<Gauge>,
    /// Where the transfer adds up its moving time.
    pub moving: Arc<AtomicU64>,
}

impl Queued {
    pub fn control(frame: KvFrame) -> Self {
        Self {
            frame,
            queued_at: Instant::now(),
            kv: None,
            written: None,
        }
    }
}

impl QueuedKv {
    pub fn new((place, bytes): (Box<dyn Place>, u64), gauge: &Arc<Gauge>, moving: Arc<AtomicU64>) -> Self {
        gauge.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        Self {
            place,
            bytes,
            gauge: gauge.clone(),
            moving,
        }
    }

    /// Its bytes have moved now. They were in line since `since`.
    pub fn moved(self, pace: &mut Pace, since: Instant) {
        self.gauge.taken_bytes.fetch_add(self.bytes, Ordering::Relaxed);
        pace.moved(&self.moving, since);
    }
}

impl Drop for QueuedKv {
    fn drop(&mut self) {
        self.gauge.waiting_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes that wait and bytes that were sent. The stall watch reads both.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    pub waiting_bytes: AtomicU64,
    pub taken_bytes: AtomicU64,
}

/// Reports how long each frame was moving. The queue is first in, first out; the time counts from when the frame came to
/// the front.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    last: Option<Instant>,
}

impl Pace {
    fn moved(&mut self, moving: &AtomicU64, queued_at: Instant) {
        let now = Instant::now();
        let came_up = self.last.map_or(queued_at, |last| last.max(queued_at));
        self.last = Some(now);
        moving.fetch_add(nanos(now.saturating_duration_since(came_up)), Ordering::Relaxed);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The queue of a transport whose frames carry their bytes. The connection takes a frame only when it can write, so a taken
/// frame counts as written.
#[derive(Debug)]
pub(crate) struct Outgoing {
    queue: Arc<SharedQueue>,
    pace: Pace,
    _emptied_with_this: DropGuard,
}

/// `None` when the pair is over.
#[derive(Debug)]
struct SharedQueue(Mutex<Option<mpsc::Receiver<Queued>>>);

impl SharedQueue {
    fn lock(&self) -> MutexGuard<'_, Option<mpsc::Receiver<Queued>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops every frame that waits, and every frame that comes.
    async fn empty(&self) {
        let queue = self.lock().take();
        if let Some(mut queue) = queue {
            queue.close();
            while queue.recv().await.is_some() {}
        }
    }
}

impl Outgoing {
    /// Needs a Tokio runtime around it. A connection whose peer takes no bytes does not look at this stream, and keeps it until
    /// the connection is called dead. So a task of its own drops the waiting frames when the pair is `over`, and their room is
    /// free for the other pairs.
    pub fn new(queue: mpsc::Receiver<Queued>, over: &CancellationToken) -> Self {
        let queue = Arc::new(SharedQueue(Mutex::new(Some(queue))));
        let over = over.child_token();
        let (ended, shared) = (over.clone(), queue.clone());
        tokio::spawn(async move {
            ended.cancelled().await;
            shared.empty().await;
        });
        Self {
            queue,
            pace: Pace::default(),
            _emptied_with_this: over.drop_guard(),
        }
    }
}

impl Stream for Outgoing {
    type Item = KvFrame;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = match &mut *self.queue.lock() {
            Some(queue) => queue.poll_recv(context),
            None => Poll::Ready(None),
        };
        let queued = std::task::ready!(polled);
        Poll::Ready(queued.map(|queued| {
            if let Some(kv) = queued.kv {
                kv.moved(&mut self.pace, queued.queued_at);
            }
            if let Some(written) = queued.written {
                let _ = written.send(Instant::now());
            }
            queued.frame
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::within;
    use crate::link::budget::{Budget, Share};

    /// The smallest budget, as one frame.
    const FRAME_BYTES: usize = 64 << 10;

    #[tokio::test]
    async fn frames_of_a_lost_pair_free_their_room_though_the_connection_keeps_their_stream() {
        let budget = Budget::of(FRAME_BYTES as u64);
        let (lost, other) = (Share::of(&budget), Share::of(&budget));
        let (outbox, queue) = Outbox::new();
        // Nobody looks at it: the peer stands still.
        let _outgoing = Outgoing::new(queue, &outbox.over);
        let placed: (Box<dyn Place>, u64) = (Box::new(lost.take(FRAME_BYTES).await), FRAME_BYTES as u64);
        let frame = KvFrame::Begin {
            transfer: serving_core::ids::TransferId(1),
        };
        let queued = Queued {
            kv: Some(QueuedKv::new(placed, &outbox.gauge, Arc::default())),
            ..Queued::control(frame)
        };
        outbox.frames.send(queued).await.unwrap();
        let _own = other.take(FRAME_BYTES).await;
        let before = tokio::time::timeout(Duration::from_millis(20), other.take(FRAME_BYTES)).await;
        assert!(before.is_err(), "the room was not in use");
        outbox.over.cancel();
        within("the room of the lost pair", other.take(FRAME_BYTES)).await;
        assert_eq!(outbox.gauge.waiting_bytes.load(Ordering::Relaxed), 0);
        assert!(outbox.frames.is_closed());
    }
}
