//! The copies of one transfer: a short line of blocks that one blocking thread exports, sums and queues as frames, one
//! after the other. So `push` costs no change of threads for each block, and the copy of one block overlaps with the next
//! push.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::messages::{KvBlockFrame, KvFrame};
use serving_core::ids::BlockId;
use tokio::sync::Notify;

use super::pair_stream::{PairStream, Signals};
use crate::link::queue::{Queued, QueuedKv};
use crate::link::{Copied, NoPlace, NotCopied, Place};
use crate::transport::KvSource;

/// Each batch wakes the stream's writer once. This many copies of a small model's blocks take 0.2 ms.
const FRAMES_SENT_AT_ONCE: usize = 8;

/// One frame to be made.
#[derive(Debug)]
pub(super) struct Copy {
    pub block: BlockId,
    pub layers: Range<u32>,
    pub place: Box<dyn Place>,
    /// Complete except for bytes and checksum.
    pub header: KvBlockFrame,
    /// Where the transfer adds up its moving time.
    pub moving: Arc<AtomicU64>,
}

/// The entries of the line.
#[derive(Debug)]
enum Work {
    Copy(Copy),
    /// A frame that needs no copy.
    Frame(Queued),
}

/// The pair's limit of bytes in flight bounds it: each copy has its room already.
#[derive(Debug)]
pub(super) struct Copies {
    source: Arc<dyn KvSource>,
    live: Arc<PairStream>,
    signals: Arc<Signals>,
    line: Mutex<Line>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Line {
    waiting: VecDeque<Work>,
    is_running: bool,
    failed: Option<NotCopied>,
}

impl Copies {
    pub fn new(source: Arc<dyn KvSource>, live: Arc<PairStream>, signals: Arc<Signals>) -> Arc<Self> {
        Arc::new(Self {
            source,
            live,
            signals,
            line: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Ends with the transfer's first failure, and takes the failure out.
    pub async fn failed(&self) -> NotCopied {
        loop {
            let changed = self.changed.notified();
            if let Some(failed) = self.take_failed() {
                return failed;
            }
            changed.await;
        }
    }

    pub fn take_failed(&self) -> Option<NotCopied> {
        self.line().failed.take()
    }

    /// Adds a frame behind the copies, so that it leaves in one write with the last of them. Gives the frame back when no
    /// copy is under way.
    ///
    /// # Errors
    /// The transfer's first failure, taken out.
    pub fn add_behind(&self, frame: Queued) -> Result<Option<Queued>, NotCopied> {
        let mut line = self.line();
        if let Some(failed) = line.failed.take() {
            return Err(failed);
        }
        if !line.is_running {
            return Ok(Some(frame));
        }
        line.waiting.push_back(Work::Frame(frame));
        Ok(None)
    }

    pub fn add(self: &Arc<Self>, copy: Copy) {
        let mut line = self.line();
        line.waiting.push_back(Work::Copy(copy));
        if !line.is_running {
            line.is_running = true;
            let this = self.clone();
            tokio::task::spawn_blocking(move || this.run());
        }
    }

    /// Waits until the line is empty or a copy fails.
    fn run(self: Arc<Self>) {
        let mut ending = Ending {
            copies: &self,
            failed: Some(NotCopied::BrokeOff),
        };
        let mut made = Vec::with_capacity(FRAMES_SENT_AT_ONCE);
        while let Some(work) = self.next(&mut made) {
            let queued = match work {
                Work::Copy(copy) => self.make(copy),
                Work::Frame(frame) => Ok(frame),
            };
            let sent = queued.and_then(|queued| {
                made.push(queued);
                match made.len() {
                    FRAMES_SENT_AT_ONCE => self.send(&mut made),
                    _ => Ok(()),
                }
            });
            if let Err(failed) = sent {
                ending.failed = Some(failed);
                return;
            }
        }
        ending.failed = None;
    }

    /// The next work. Before the line is found empty, all finished frames are sent, because a caller that finds it empty
    /// sends the next frame itself.
    fn next(&self, made: &mut Vec<Queued>) -> Option<Work> {
        loop {
            {
                let mut line = self.line();
                let next = line.waiting.pop_front();
                if next.is_some() || made.is_empty() {
                    line.is_running = next.is_some();
                    return next;
                }
            }
            if self.send(made).is_err() {
                // Nobody takes frames: the pair has ended, and reports that itself.
                made.clear();
            }
        }
    }

    /// The room was taken before, so the queue can be full only with frames of other transfers.
    fn send(&self, made: &mut Vec<Queued>) -> Result<(), NotCopied> {
        for queued in made.drain(..) {
            self.live
                .outbox
                .frames
                .blocking_send(queued)
                .map_err(|_| NotCopied::NoStream)?;
        }
        Ok(())
    }

    fn make(&self, copy: Copy) -> Result<Queued, NotCopied> {
        let Copy {
            mut place, mut header, ..
        } = copy;
        let from = Copied {
            source: &*self.source,
            block: copy.block,
            bytes: copy.layers.len() * self.source.layer_bytes(),
            layers: copy.layers,
        };
        // Closed: the transfer has ended, and a decode node whose pool we write has been told that we write no more.
        let filled = self.signals.gate.pass(|| place.fill(&from));
        header.checksum = filled.unwrap_or(Err(NotCopied::Place(NoPlace::Unmapped)))?;
        header.data = place.inline();
        let placed = (place, from.bytes as u64);
        Ok(Queued {
            kv: Some(QueuedKv::new(placed, &self.live.outbox.gauge, copy.moving)),
            ..Queued::control(KvFrame::Block(header))
        })
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reports how the thread ended, also when a copy panicked.
struct Ending<'a> {
    copies: &'a Copies,
    failed: Option<NotCopied>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if let Some(failed) = self.failed.take() {
            let mut line = self.copies.line();
            // Set before a frame in line is dropped, because the frame's owner then looks here for the reason.
            line.failed = Some(failed);
            line.is_running = false;
            line.waiting.clear();
        }
        self.copies.changed.notify_waiters();
    }
}
