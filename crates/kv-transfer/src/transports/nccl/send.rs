//! A pair at the sender: one task that has the pair's frames, the control stream and the communicator. Its order is that of the
//! control stream: an exchange is announced there and posted next, and the decode node posts it when it reads the announcement.
//!
//! A finished exchange proves nothing to the sender. Its slots are lent until the decode node says that the frames have
//! landed, and a transfer counts only with the decode node's ack. One exchange is under way at a time.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use proto::messages::KvFrame;
use serving_core::ids::NodeId;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::carrier::{Packed, SendRing};
use super::fault::Ending;
use super::group::{FRAMES_MAX, Group, RingShape, Run, packed};
use super::library::{CommunicatorId, Direction, Library, RankOf};
use super::messages::{ToDecode, ToDecodeWire, ToPrefill, ToPrefillWire};
use super::rest::Rests;
use super::rings::Rings;
use super::worker::{Plan, Running, State, Worker};
use crate::device::{DeviceFault, DeviceLimits};
use crate::link::LinkReply;
use crate::link::queue::{Pace, Queued, QueuedKv};
use crate::transport::PairFault;

/// Frames that are taken from the pair's queue before an exchange has room for them. Then the queue fills.
const WAITING_MAX: usize = 2 * FRAMES_MAX;

/// What a pair has from its transport.
pub(super) struct Facts {
    pub peer: NodeId,
    pub library: Arc<dyn Library>,
    pub rings: Arc<Rings>,
    pub rests: Arc<Rests>,
    pub shape: RingShape,
    pub has_checksums: bool,
}

type Replies = mpsc::Sender<Result<LinkReply, PairFault>>;

pub(super) struct Sending {
    facts: Facts,
    out: mpsc::Sender<ToDecodeWire>,
    replies: Replies,
    /// Told to the pair's transfers when the communicator is there.
    ring: watch::Sender<Option<Arc<SendRing>>>,
    over: CancellationToken,
    waiting: VecDeque<Queued>,
    phase: Phase,
    exchange: Option<Exchange>,
    /// Whether any frame has landed by this communicator.
    has_moved: bool,
    pace: Pace,
}

/// The way to a communicator.
#[allow(clippy::large_enum_variant, reason = "a pair has one")]
enum Phase {
    /// No transfer has begun.
    Unwanted,
    /// The decode node was asked for an id.
    Wanted {
        since: Instant,
    },
    /// Some rank is not made yet.
    Making {
        since: Instant,
        id: CommunicatorId,
        worker: Worker,
        ring: Arc<SendRing>,
        made: Option<RankOf>,
    },
    Ready {
        worker: Worker,
    },
}

/// One exchange that has been announced.
struct Exchange {
    frames: Vec<(QueuedKv, Instant)>,
    running: Running,
    has_landed: bool,
}

#[allow(clippy::large_enum_variant, reason = "one lives at a time, on the stack")]
enum Event {
    Over,
    Came(Result<Option<ToPrefillWire>, Status>),
    Worker(State),
    HasRun,
    TooLate,
    Frame(Queued),
}

/// Why the task ends.
enum Stop {
    /// The pair wants it.
    Closed,
    Broken(PairFault),
    Ended(Arc<Ending>),
}

impl From<Ending> for Stop {
    fn from(ending: Ending) -> Self {
        Stop::Ended(Arc::new(ending))
    }
}

impl Sending {
    pub fn new(
        facts: Facts,
        (out, replies): (mpsc::Sender<ToDecodeWire>, Replies),
        ring: watch::Sender<Option<Arc<SendRing>>>,
        over: CancellationToken,
    ) -> Self {
        Self {
            facts,
            out,
            replies,
            ring,
            over,
            waiting: VecDeque::new(),
            phase: Phase::Unwanted,
            exchange: None,
            has_moved: false,
            pace: Pace::default(),
        }
    }

    /// Until the pair is over, or its communicator is.
    pub async fn run(mut self, mut queue: mpsc::Receiver<Queued>, mut incoming: Streaming<ToPrefillWire>) {
        let stop = loop {
            let event = self.next(&mut queue, &mut incoming).await;
            if let Err(stop) = self.apply(event).await {
                break stop;
            }
        };
        if self.is_rest_due(&stop) {
            self.facts.rests.begin(&self.facts.peer, Instant::now());
        }
        let fault = match stop {
            Stop::Closed => return,
            Stop::Broken(fault) => fault,
            Stop::Ended(ending) => PairFault::Broken(ending.to_string()),
        };
        let _ = self.tell(Err(fault)).await;
    }

    /// Whether the pair goes without NCCL for a while. The pair's own watch closes a pair whose exchange hangs before the exchange
    /// is late, so a close counts too while something is waited for. After a close that this node wanted, a rest does no harm.
    fn is_rest_due(&self, stop: &Stop) -> bool {
        let hangs = self.exchange.as_ref().is_some_and(|exchange| !exchange.has_landed);
        let is_due = match stop {
            Stop::Closed => hangs || self.phase.since().is_some(),
            Stop::Broken(_) => false,
            Stop::Ended(_) => true,
        };
        is_due && !self.has_moved
    }

    async fn next(&mut self, queue: &mut mpsc::Receiver<Queued>, incoming: &mut Streaming<ToPrefillWire>) -> Event {
        let deadline = self.phase.since().map(|since| since + self.limits().communicator_wait);
        let has_room = self.waiting.len() < WAITING_MAX;
        tokio::select! {
            biased;
            () = self.over.cancelled() => Event::Over,
            came = incoming.message() => Event::Came(came),
            state = next_state(&mut self.phase) => Event::Worker(state),
            () = has_run(&mut self.exchange) => Event::HasRun,
            () = passed(deadline) => Event::TooLate,
            queued = queue.recv(), if has_room => queued.map_or(Event::Over, Event::Frame),
        }
    }

    fn limits(&self) -> DeviceLimits {
        self.facts.rings.kv().limits()
    }

    async fn apply(&mut self, event: Event) -> Result<(), Stop> {
        match event {
            Event::Over => return Err(Stop::Closed),
            Event::Came(came) => self.take(came).await?,
            Event::Worker(State::Making) => {}
            Event::Worker(State::Ready) => self.made(RankOf::Prefill)?,
            Event::Worker(State::Ended(ending)) => return Err(Stop::Ended(ending)),
            Event::HasRun => {}
            Event::TooLate => return Err(self.phase.not_made().into()),
            Event::Frame(queued) => self.waiting.push_back(queued),
        }
        self.advance().await
    }

    async fn take(&mut self, came: Result<Option<ToPrefillWire>, Status>) -> Result<(), Stop> {
        let broken = |detail: String| Stop::Broken(PairFault::Broken(detail));
        let wire = came.map_err(|status| broken(proto::status::words(&status)))?;
        let wire = wire.ok_or_else(|| broken("the decode node ended the stream".to_owned()))?;
        match ToPrefill::try_from(wire).map_err(|bad| broken(bad.to_string()))? {
            ToPrefill::Reply(reply) => self.tell(Ok(LinkReply::Reply(reply))).await,
            ToPrefill::Id(id) => self.make(id).await,
            ToPrefill::Ready => self.made(RankOf::Decode),
            ToPrefill::Landed => match &mut self.exchange {
                Some(exchange) if !exchange.has_landed => {
                    exchange.has_landed = true;
                    Ok(())
                }
                _ => Err(Ending::Contract("an exchange landed that nobody had announced").into()),
            },
            ToPrefill::Ended(why) => Err(Ending::ByPeer(why).into()),
        }
    }

    /// Begins to make this node's rank.
    async fn make(&mut self, id: CommunicatorId) -> Result<(), Stop> {
        let Phase::Wanted { since } = self.phase else {
            return Err(Ending::Contract("an id came that nobody had asked for").into());
        };
        let (rings, shape, sums) = (self.facts.rings.clone(), self.facts.shape, self.facts.has_checksums);
        let bytes = usize::try_from(shape.bytes()).unwrap_or(usize::MAX);
        let making = tokio::task::spawn_blocking(move || {
            let memory = rings.take(bytes)?;
            SendRing::new(memory, (shape, sums))
        });
        // The work does not panic, so the runtime is ending.
        let ring: Result<Arc<SendRing>, DeviceFault> = making.await.map_err(|_| Stop::Closed)?;
        let ring = ring.map_err(Ending::Device)?;
        let kv = self.facts.rings.kv().clone();
        let worker = Worker::start(Plan {
            library: self.facts.library.clone(),
            id,
            rank: RankOf::Prefill,
            held: ring.clone(),
            limits: kv.limits(),
            keep: Arc::new(move |what| kv.keep(what)),
        })?;
        self.phase = Phase::Making {
            since,
            id,
            worker,
            ring,
            made: None,
        };
        Ok(())
    }

    /// One rank is made.
    fn made(&mut self, rank: RankOf) -> Result<(), Stop> {
        self.phase = match std::mem::replace(&mut self.phase, Phase::Unwanted) {
            Phase::Making {
                since,
                id,
                worker,
                ring,
                made: None,
            } => Phase::Making {
                since,
                id,
                worker,
                ring,
                made: Some(rank),
            },
            Phase::Making {
                since,
                worker,
                ring,
                made: Some(other),
                ..
            } if other != rank => {
                // Not before: bytes that wait for a communicator would count as bytes that do not move.
                self.ring.send_replace(Some(ring));
                let made_ms = since.elapsed().as_millis();
                tracing::info!(peer = %self.facts.peer, made_ms, "a communicator is made");
                Phase::Ready { worker }
            }
            _ => return Err(Ending::Contract("a rank was made that nobody had begun").into()),
        };
        Ok(())
    }

    /// Ends an exchange that has landed, and sends what may be sent.
    async fn advance(&mut self) -> Result<(), Stop> {
        let landed = self
            .exchange
            .take_if(|exchange| exchange.has_landed && exchange.running.is_over());
        for (kv, since) in landed.into_iter().flat_map(|exchange| exchange.frames) {
            self.has_moved = true;
            kv.moved(&mut self.pace, since);
        }
        while let Some(has_bytes) = self.waiting.front().map(|first| first.kv.is_some()) {
            let is_free = self.exchange.is_none() && matches!(self.phase, Phase::Ready { .. });
            match has_bytes {
                false => self.send_control().await?,
                true if is_free => self.send_group().await?,
                true => return Ok(()),
            }
        }
        Ok(())
    }

    async fn send_control(&mut self) -> Result<(), Stop> {
        let Some(queued) = self.waiting.pop_front() else {
            return Ok(());
        };
        if matches!(self.phase, Phase::Unwanted) && matches!(queued.frame, KvFrame::Begin { .. }) {
            let since = Instant::now();
            self.phase = Phase::Wanted { since };
            self.say(ToDecode::Want).await?;
        }
        self.say(ToDecode::Frame(queued.frame)).await?;
        if let Some(written) = queued.written {
            let _ = written.send(Instant::now());
        }
        Ok(())
    }

    /// Announces the frames that are packed, and posts them.
    async fn send_group(&mut self) -> Result<(), Stop> {
        let since = Instant::now();
        let (mut blocks, mut frames, mut runs) = (Vec::new(), Vec::new(), Vec::new());
        while blocks.len() < FRAMES_MAX && self.waiting.front().is_some_and(|first| first.kv.is_some()) {
            let Some(queued) = self.waiting.pop_front() else { break };
            let (KvFrame::Block(header), Some(kv)) = (queued.frame, queued.kv) else {
                return Err(Ending::Contract("a frame with bytes is no block").into());
            };
            runs.push(run_of(&kv)?);
            // At most a slot, whose size is a u32.
            blocks.push((header, u32::try_from(kv.bytes).unwrap_or(u32::MAX)));
            frames.push((kv, since));
        }
        let runs = packed(runs.into_iter());
        let run_bytes = runs.iter().map(|run| u32::try_from(run.bytes).unwrap_or(u32::MAX));
        let group = Group {
            blocks,
            run_bytes: run_bytes.collect(),
        };
        self.say(ToDecode::Group(group)).await?;
        let Phase::Ready { worker } = &self.phase else {
            return Err(Ending::Contract("an exchange without a communicator").into());
        };
        self.exchange = Some(Exchange {
            frames,
            running: worker.exchange(Direction::Send, runs),
            has_landed: false,
        });
        Ok(())
    }

    /// A stream that takes no messages ends, and the replies say why.
    async fn say(&mut self, message: ToDecode) -> Result<(), Stop> {
        tokio::select! {
            biased;
            () = self.over.cancelled() => Err(Stop::Closed),
            _ = self.out.send(message.into()) => Ok(()),
        }
    }

    async fn tell(&mut self, reply: Result<LinkReply, PairFault>) -> Result<(), Stop> {
        tokio::select! {
            biased;
            () = self.over.cancelled() => Err(Stop::Closed),
            told = self.replies.send(reply) => told.map_err(|_| Stop::Closed),
        }
    }
}

impl Phase {
    /// When the pair began to wait for its communicator.
    fn since(&self) -> Option<Instant> {
        match self {
            Phase::Wanted { since } | Phase::Making { since, .. } => Some(*since),
            Phase::Unwanted | Phase::Ready { .. } => None,
        }
    }

    fn not_made(&self) -> Ending {
        let waited = self.since().map(|since| since.elapsed()).unwrap_or_default();
        let listener = match self {
            Phase::Making { id, .. } => id.listener(),
            _ => None,
        };
        Ending::NotMade {
            waited,
            error: None,
            listener,
        }
    }
}

fn run_of(kv: &QueuedKv) -> Result<Run, Stop> {
    let place: &dyn Any = &*kv.place;
    let packed = place.downcast_ref::<Packed>().map(Packed::run);
    packed.ok_or_else(|| Ending::Contract("a frame has no place in the ring").into())
}

async fn next_state(phase: &mut Phase) -> State {
    match phase {
        Phase::Making { worker, .. } | Phase::Ready { worker } => worker.next_state().await,
        Phase::Unwanted | Phase::Wanted { .. } => std::future::pending().await,
    }
}

async fn has_run(exchange: &mut Option<Exchange>) {
    match exchange {
        Some(exchange) => exchange.running.over().await,
        None => std::future::pending().await,
    }
}

async fn passed(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
