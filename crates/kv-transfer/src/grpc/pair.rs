//! One pair: connects, shakes hands, carries transfers, notices stalls, reconnects for ever.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use proto::messages::{Hello, KV_FRAME_BYTES_MAX, KvFrame, KvReply, PROTOCOL_VERSION};
use proto::v1;
use proto::v1::handoff_service_client::HandoffServiceClient;
use rand::Rng as _;
use serving_core::ids::{NodeId, TransferId};
use serving_core::node::PairHealth;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

use super::queue::{FRAMES_QUEUED_MAX, Gauge, Outgoing, Queued};
use super::sender::GrpcConfig;
use crate::transport::{PairFault, PairPeer};

const BACK_OFF_FIRST: Duration = Duration::from_millis(50);
const BACK_OFF_MAX: Duration = Duration::from_secs(2);
const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);
const HELLO_TIME_LIMIT: Duration = Duration::from_secs(5);
/// A peer whose machine vanished is noticed within interval + time limit.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Replies are small; the data goes the other way, under the receiver's windows.
const REPLY_WINDOW_BYTES: u32 = 1 << 20;

/// How a transfer on a stream has ended, as its sender learns it.
#[derive(Clone, Debug)]
pub(super) enum End {
    Acked,
    Refused { reason: String, detail: String },
    AbortedByPeer { reason: String },
    PairLost(PairFault),
}

/// One life of the pair's stream.
#[derive(Debug)]
pub(super) struct Live {
    pub node: NodeId,
    pub frames: mpsc::Sender<Queued>,
    /// Room for KV bytes in flight, in KiB.
    pub room: Arc<Semaphore>,
    pub gauge: Arc<Gauge>,
    transfers: Mutex<BTreeMap<TransferId, watch::Sender<Option<End>>>>,
    fault: OnceLock<PairFault>,
    over: CancellationToken,
}

impl Live {
    /// The transfer hears of its end through the receiver.
    pub fn register(&self, transfer: TransferId) -> Result<watch::Receiver<Option<End>>, PairFault> {
        let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fault) = self.fault.get() {
            return Err(fault.clone());
        }
        let (end, receiver) = watch::channel(None);
        transfers.insert(transfer, end);
        Ok(receiver)
    }

    pub fn forget(&self, transfer: TransferId) {
        let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        transfers.remove(&transfer);
    }

    pub fn fault(&self) -> PairFault {
        self.fault.get().cloned().unwrap_or(PairFault::Closed)
    }

    fn end(&self, transfer: TransferId, end: End) {
        let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waiting) = transfers.remove(&transfer) {
            waiting.send_replace(Some(end));
        }
    }

    /// Every transfer of the stream fails, the stream ends, nobody can register any more.
    fn close(&self, fault: PairFault) {
        let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = self.fault.get_or_init(|| fault).clone();
        for waiting in std::mem::take(&mut *transfers).into_values() {
            waiting.send_replace(Some(End::PairLost(fault.clone())));
        }
        drop(transfers);
        self.over.cancel();
    }
}

#[derive(Clone, Debug)]
pub(super) enum PairState {
    Usable(Arc<Live>),
    Unusable(PairFault),
}

/// A kept pair; dropping the last handle does not close it, `close` does.
#[derive(Debug)]
pub(super) struct Pair {
    pub peer: PairPeer,
    pub state: watch::Receiver<PairState>,
    health: watch::Sender<Vec<PairHealth>>,
    closed: CancellationToken,
}

impl Pair {
    pub fn open(peer: PairPeer, config: Arc<GrpcConfig>, health: watch::Sender<Vec<PairHealth>>) -> Self {
        let (state_in, state) = watch::channel(PairState::Unusable(PairFault::Connecting));
        let closed = CancellationToken::new();
        let keeper = Keeper {
            peer: peer.clone(),
            config,
            state: state_in,
            health: health.clone(),
            closed: closed.clone(),
        };
        keeper.tell(Some(&PairFault::Connecting));
        tokio::spawn(keeper.keep());
        Self {
            peer,
            state,
            health,
            closed,
        }
    }

    /// Idempotent. A closed pair no longer speaks of its health.
    pub fn close(&self) {
        if !self.closed.is_cancelled() {
            self.closed.cancel();
            self.health
                .send_modify(|pairs| pairs.retain(|pair| pair.decode_node != self.peer.node));
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.close();
    }
}

/// The task behind a pair.
#[derive(Debug)]
struct Keeper {
    peer: PairPeer,
    config: Arc<GrpcConfig>,
    state: watch::Sender<PairState>,
    health: watch::Sender<Vec<PairHealth>>,
    closed: CancellationToken,
}

impl Keeper {
    async fn keep(self) {
        let mut back_off = BACK_OFF_FIRST;
        loop {
            let fault = tokio::select! {
                fault = self.one_stream() => fault,
                () = self.closed.cancelled() => PairFault::Closed,
            };
            if self.lose(&fault) {
                back_off = BACK_OFF_FIRST;
                tracing::warn!(peer = %self.peer.node, %fault, "lost a pair");
            } else {
                tracing::debug!(peer = %self.peer.node, %fault, "no pair yet");
            }
            if self.closed.is_cancelled() {
                return;
            }
            let pause = back_off.mul_f64(rand::rng().random_range(0.5..1.0));
            back_off = (back_off * 2).min(BACK_OFF_MAX);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.closed.cancelled() => {}
            }
        }
    }

    /// One connection from its start to its end.
    async fn one_stream(&self) -> PairFault {
        match self.connect().await {
            Ok((live, replies)) => {
                self.state.send_replace(PairState::Usable(live.clone()));
                self.tell(None);
                tracing::info!(peer = %self.peer.node, address = %self.peer.address, "pair is up");
                carry(&live, replies, &self.config).await
            }
            Err(fault) => fault,
        }
    }

    async fn connect(&self) -> Result<(Arc<Live>, tonic::Streaming<v1::KvReply>), PairFault> {
        if self.peer.compatibility != self.config.compatibility {
            return Err(PairFault::Incompatible);
        }
        let unreachable = |error: &dyn std::fmt::Display| PairFault::Unreachable(error.to_string());
        let endpoint = Endpoint::from_shared(format!("http://{}", self.peer.address))
            .map_err(|error| unreachable(&error))?
            .connect_timeout(CONNECT_TIME_LIMIT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIME_LIMIT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(REPLY_WINDOW_BYTES)
            .initial_connection_window_size(REPLY_WINDOW_BYTES);
        let channel = endpoint.connect().await.map_err(|error| unreachable(&error))?;
        let mut client = HandoffServiceClient::new(channel)
            .max_encoding_message_size(KV_FRAME_BYTES_MAX)
            .max_decoding_message_size(KV_FRAME_BYTES_MAX);
        let (live, outgoing) = self.new_stream();
        let hello = KvFrame::Hello(Hello {
            from: self.config.me.clone(),
            to: self.peer.node.clone(),
            protocol_version: PROTOCOL_VERSION,
            compatibility: self.config.compatibility,
        });
        let _ = live.frames.send(Queued::control(hello)).await;
        let shake_hands = async {
            let broken = |status: tonic::Status| PairFault::Broken(status.to_string());
            let outgoing = outgoing.take_until(live.over.clone().cancelled_owned());
            let mut replies = client.push(outgoing).await.map_err(broken)?.into_inner();
            let first = replies.message().await.map_err(broken)?;
            match first.map(KvReply::try_from) {
                Some(Ok(KvReply::Hello(reply))) => match reply.refused {
                    None => Ok(replies),
                    Some(reason) => Err(PairFault::Refused(reason)),
                },
                other => Err(PairFault::Broken(format!("expected a hello, got {other:?}"))),
            }
        };
        let shaken = tokio::time::timeout(HELLO_TIME_LIMIT, shake_hands).await;
        let replies = shaken.unwrap_or_else(|_| Err(PairFault::Broken("no answer to the hello".to_owned())));
        match replies {
            Ok(replies) => Ok((live, replies)),
            Err(fault) => {
                live.close(fault.clone());
                Err(fault)
            }
        }
    }

    fn new_stream(&self) -> (Arc<Live>, Outgoing) {
        let (frames, queue) = mpsc::channel(FRAMES_QUEUED_MAX);
        let gauge = Arc::new(Gauge::default());
        let live = Live {
            node: self.peer.node.clone(),
            frames,
            room: Arc::new(Semaphore::new(self.config.room_kib() as usize)),
            gauge: gauge.clone(),
            transfers: Mutex::default(),
            fault: OnceLock::new(),
            over: CancellationToken::new(),
        };
        (Arc::new(live), Outgoing::new(queue, gauge, self.config.tap.clone()))
    }

    /// True when there was a usable stream to lose.
    fn lose(&self, fault: &PairFault) -> bool {
        let before = self.state.send_replace(PairState::Unusable(fault.clone()));
        self.tell(Some(fault));
        match before {
            PairState::Usable(live) => {
                live.close(fault.clone());
                true
            }
            PairState::Unusable(_) => false,
        }
    }

    fn tell(&self, fault: Option<&PairFault>) {
        let unusable_reason = fault.map(|fault| fault.name().to_owned());
        self.health.send_if_modified(|pairs| {
            if self.closed.is_cancelled() {
                return false;
            }
            let next = PairHealth {
                decode_node: self.peer.node.clone(),
                unusable_reason,
            };
            match pairs.iter_mut().find(|pair| pair.decode_node == self.peer.node) {
                Some(pair) if *pair == next => false,
                Some(pair) => {
                    *pair = next;
                    true
                }
                None => {
                    pairs.push(next);
                    pairs.sort_by(|a, b| a.decode_node.cmp(&b.decode_node));
                    true
                }
            }
        });
    }
}

/// Hands replies to their transfers and watches the pace, until the stream is over.
async fn carry(live: &Live, mut replies: tonic::Streaming<v1::KvReply>, config: &GrpcConfig) -> PairFault {
    let mut watch = StallWatch::new(config);
    let mut ticks = tokio::time::interval(config.stall_window / 4);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            reply = replies.message() => match reply {
                Ok(Some(reply)) => match KvReply::try_from(reply) {
                    Ok(reply) => give(live, reply),
                    Err(error) => return PairFault::Broken(error.to_string()),
                },
                Ok(None) => return PairFault::Broken("the decode node ended the stream".to_owned()),
                Err(status) => return PairFault::Broken(status.to_string()),
            },
            _ = ticks.tick() => {
                if let Some(fault) = watch.look(live, Instant::now()) {
                    return fault;
                }
            }
        }
    }
}

fn give(live: &Live, reply: KvReply) {
    match reply {
        KvReply::Hello(_) => {}
        KvReply::Ack { transfer } => live.end(transfer, End::Acked),
        KvReply::Refused {
            transfer,
            reason,
            detail,
        } => live.end(transfer, End::Refused { reason, detail }),
        KvReply::Aborted { transfer, reason } => live.end(transfer, End::AbortedByPeer { reason }),
    }
}

/// Judges progress in bytes per second: a pair that has bytes to move and moves next to none is as good as dead.
#[derive(Debug)]
struct StallWatch {
    window: Duration,
    floor_bytes_per_second: u64,
    /// Start of the window: since then bytes have been waiting all the time.
    since: Option<(Instant, u64)>,
}

impl StallWatch {
    fn new(config: &GrpcConfig) -> Self {
        Self {
            window: config.stall_window,
            floor_bytes_per_second: config.floor_bytes_per_second,
            since: None,
        }
    }

    fn look(&mut self, live: &Live, now: Instant) -> Option<PairFault> {
        let taken = live.gauge.taken_bytes.load(Ordering::Relaxed);
        if live.gauge.waiting_bytes.load(Ordering::Relaxed) == 0 {
            self.since = None;
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
