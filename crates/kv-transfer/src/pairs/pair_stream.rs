//! One life of a pair: the transfers on its stream, the replies that end them, and the watch over its speed.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use futures::stream::BoxStream;
use proto::messages::{KvFrame, KvReply};
use serving_core::ids::{NodeId, TransferId};
use tokio::sync::watch;

use super::PairConfig;
use crate::link::queue::{Gauge, Outbox, Queued};
use crate::link::{Carrier, Link, LinkReply};
use crate::transport::PairFault;

/// How a transfer on a stream has ended, for its sender.
#[derive(Clone, Debug)]
pub(super) enum End {
    Acked,
    Refused { reason: String, detail: String },
    AbortedByPeer { reason: String },
    PairLost(PairFault),
}

/// Whether a transfer may no longer touch the memory that its copies write. Held for reading during a copy.
#[derive(Debug, Default)]
pub(super) struct Gate(RwLock<bool>);

impl Gate {
    /// `None` when it is closed.
    pub fn pass<R>(&self, copy: impl FnOnce() -> R) -> Option<R> {
        let is_closed = self.0.read().unwrap_or_else(PoisonError::into_inner);
        (!*is_closed).then(copy)
    }
    /// Closes it after the running copies. For a blocking thread.
    pub fn close(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

/// What a transfer and its stream tell each other.
#[derive(Debug, Default)]
pub(super) struct Signals {
    pub end: watch::Sender<Option<End>>,
    /// The decode node has claimed it. Sent only where the sender writes in place.
    pub begun: watch::Sender<bool>,
    pub gate: Gate,
}

/// One life of the pair's stream.
#[derive(Debug)]
pub(super) struct PairStream {
    pub node: NodeId,
    pub carrier: Arc<dyn Carrier>,
    pub outbox: Outbox,
    transfers: Mutex<Transfers>,
    fault: OnceLock<PairFault>,
}

/// The transfers under way.
#[derive(Debug, Default)]
struct Transfers {
    registered: BTreeMap<TransferId, Arc<Signals>>,
    /// When there was none for the first time since the last one began.
    idle_since: Option<Instant>,
}

pub(super) type Replies = BoxStream<'static, Result<LinkReply, PairFault>>;

impl PairStream {
    /// With the replies to its frames.
    pub fn new(node: NodeId, link: Link) -> (Arc<Self>, Replies) {
        let live = Self {
            node,
            carrier: link.carrier,
            outbox: link.outbox,
            transfers: Mutex::default(),
            fault: OnceLock::new(),
        };
        (Arc::new(live), link.replies)
    }

    fn transfers(&self) -> MutexGuard<'_, Transfers> {
        self.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A transfer that begins.
    pub fn register(&self, transfer: TransferId) -> Result<Arc<Signals>, PairFault> {
        let mut transfers = self.transfers();
        if let Some(fault) = self.fault.get() {
            return Err(fault.clone());
        }
        let signals: Arc<Signals> = Arc::default();
        transfers.registered.insert(transfer, signals.clone());
        transfers.idle_since = None;
        Ok(signals)
    }

    fn begun(&self, transfer: TransferId) {
        if let Some(registered) = self.transfers().registered.get(&transfer) {
            registered.begun.send_replace(true);
        }
    }

    /// False when the other side has ended it, or it was forgotten before.
    pub fn forget(&self, transfer: TransferId) -> bool {
        self.transfers().registered.remove(&transfer).is_some()
    }

    /// Why it is over. Only its keeper can say that this node closed it, so a stream that ended by itself is broken.
    pub fn fault(&self) -> PairFault {
        let broken = || PairFault::Broken("it takes no more frames".to_owned());
        self.fault.get().cloned().unwrap_or_else(broken)
    }

    fn end(self: &Arc<Self>, transfer: TransferId, end: End) {
        let mut transfers = self.transfers();
        let Some(registered) = transfers.registered.remove(&transfer) else {
            return;
        };
        let is_answer_due = matches!(end, End::Refused { .. } | End::AbortedByPeer { .. });
        registered.end.send_replace(Some(end));
        if is_answer_due && self.carrier.writes_in_place() {
            // The blocks wait for our message that we store no more.
            let stopped = KvFrame::Abort {
                transfer,
                reason: "stopped".to_owned(),
            };
            self.say_when_stopped(registered, stopped);
        }
    }

    /// Sends a frame once no copy of the transfer runs and none can begin. Ends with the pair at the latest.
    pub fn say_when_stopped(self: &Arc<Self>, signals: Arc<Signals>, frame: KvFrame) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            // The runtime is gone, and the process follows. Its exit tells the peer.
            return;
        };
        let live = self.clone();
        runtime.spawn(async move {
            if tokio::task::spawn_blocking(move || signals.gate.close()).await.is_ok() {
                let _ = live.outbox.frames.send(Queued::control(frame)).await;
            }
        });
    }

    /// False while a transfer is under way, or one was not long ago.
    pub fn close_if_idle(&self, idle_max: Duration, now: Instant) -> bool {
        let mut transfers = self.transfers();
        if !transfers.registered.is_empty() {
            return false;
        }
        let since = *transfers.idle_since.get_or_insert(now);
        let is_idle = now.saturating_duration_since(since) >= idle_max;
        if is_idle {
            // A transfer that comes from here on finds this, and waits for the next stream.
            let _ = self.fault.set(PairFault::Connecting);
            self.outbox.over.cancel();
        }
        is_idle
    }

    /// Every transfer of the stream fails, the stream ends, and no transfer can register any more.
    pub fn close(&self, fault: PairFault) {
        let mut transfers = self.transfers();
        let fault = self.fault.get_or_init(|| fault).clone();
        for waiting in std::mem::take(&mut transfers.registered).into_values() {
            waiting.end.send_replace(Some(End::PairLost(fault.clone())));
        }
        drop(transfers);
        self.outbox.over.cancel();
    }
}

/// How one life of a pair's stream ends.
#[derive(Debug)]
pub(super) enum Carried {
    Over(PairFault),
    /// It carried nothing for [`PairConfig::idle_max`], and gives its memory back.
    Idle,
}

/// Passes replies to their transfers and watches the speed, until the stream is over.
pub(super) async fn carry(live: &Arc<PairStream>, mut replies: Replies, config: &PairConfig) -> Carried {
    let mut watch = StallWatch::new(config);
    let mut ticks = tokio::time::interval(watch.tick());
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            reply = replies.next() => match reply {
                Some(Ok(reply)) => give(live, reply),
                Some(Err(fault)) => return Carried::Over(fault),
                None => return Carried::Over(PairFault::Broken("the decode node ended the stream".to_owned())),
            },
            _ = ticks.tick() => {
                let now = Instant::now();
                if let Some(fault) = watch.look(&live.outbox.gauge, now) {
                    return Carried::Over(fault);
                }
                if live.carrier.holds_memory() && live.close_if_idle(config.idle_max, now) {
                    return Carried::Idle;
                }
            }
        }
    }
}

fn give(live: &Arc<PairStream>, reply: LinkReply) {
    match reply {
        LinkReply::Begun(transfer) => live.begun(transfer),
        LinkReply::Reply(KvReply::Hello(_)) => {}
        LinkReply::Reply(KvReply::Ack { transfer }) => live.end(transfer, End::Acked),
        LinkReply::Reply(KvReply::Refused {
            transfer,
            reason,
            detail,
        }) => live.end(transfer, End::Refused { reason, detail }),
        LinkReply::Reply(KvReply::Aborted { transfer, reason }) => live.end(transfer, End::AbortedByPeer { reason }),
    }
}

/// Looks in one window. A stall is noticed a quarter of the window late at most.
const LOOKS_IN_WINDOW: u32 = 4;

/// Judges the speed in bytes per second. A pair that has bytes to move and moves almost none counts as dead.
#[derive(Debug)]
struct StallWatch {
    window: Duration,
    floor_bytes_per_second: u64,
    /// Start of the window. Bytes have been waiting all the time since then.
    since: Option<(Instant, u64)>,
    looked: Option<Instant>,
}

impl StallWatch {
    fn new(config: &PairConfig) -> Self {
        Self {
            window: config.stall_window,
            floor_bytes_per_second: config.floor_bytes_per_second,
            since: None,
            looked: None,
        }
    }

    /// Between two looks.
    fn tick(&self) -> Duration {
        self.window / LOOKS_IN_WINDOW
    }

    fn look(&mut self, gauge: &Gauge, now: Instant) -> Option<PairFault> {
        let looked = self.looked.replace(now);
        let taken = gauge.taken_bytes.load(Ordering::Relaxed);
        if gauge.waiting_bytes.load(Ordering::Relaxed) == 0 {
            self.since = None;
            return None;
        }
        // This process itself stood still (SIGSTOP, a paused machine). It sent nothing meanwhile, and the peer is not to blame.
        if looked.is_some_and(|looked| now.saturating_duration_since(looked) > 2 * self.tick()) {
            self.since = Some((now, taken));
            return None;
        }
        let (start, taken_then) = *self.since.get_or_insert((now, taken));
        let elapsed = now.saturating_duration_since(start);
        if elapsed < self.window {
            return None;
        }
        self.since = Some((now, taken));
        let moved_bytes = taken.saturating_sub(taken_then);
        let due = self.floor_bytes_per_second as f64 * elapsed.as_secs_f64();
        ((moved_bytes as f64) < due).then_some(PairFault::Stalled {
            moved_bytes,
            window_ms: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
            floor_bytes_per_second: self.floor_bytes_per_second,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{compatibility, node};

    #[test]
    fn a_pause_of_this_process_is_no_stall_of_its_peer_and_a_stall_after_it_is() {
        let config = PairConfig::new(node("prefill-0", 1), compatibility(1));
        let (mut watch, gauge, begun) = (StallWatch::new(&config), Gauge::default(), Instant::now());
        gauge.waiting_bytes.store(1 << 20, Ordering::Relaxed);
        let mut now = begun;
        for _ in 0..2 {
            assert_eq!(watch.look(&gauge, now), None);
            now += watch.tick();
        }
        now += Duration::from_secs(60);
        for _ in 0..LOOKS_IN_WINDOW {
            assert_eq!(watch.look(&gauge, now), None, "after {:?}", now - begun);
            now += watch.tick();
        }
        let fault = watch.look(&gauge, now);
        let window = u64::try_from(config.stall_window.as_millis()).unwrap();
        let is_seen =
            matches!(fault, Some(PairFault::Stalled { moved_bytes: 0, window_ms, .. }) if window_ms == window);
        assert!(is_seen, "{fault:?}");
    }
}
