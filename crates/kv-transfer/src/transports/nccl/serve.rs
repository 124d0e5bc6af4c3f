//! The receiver's end: the method of the handoff service, and a task for each sender's control stream.

use std::collections::VecDeque;
use std::sync::Arc;

use http::header::CONTENT_TYPE;
use http::{Request, Response};
use prost::Message as _;
use proto::messages::{KvFrame, KvReply, TransportOffer};
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::body::Body;
use tonic::codec::{Codec as _, EncodeBody, SingleMessageCompressionOverride};
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;

use super::KIND;
use super::fault::Ending;
use super::group::{BadGroup, FRAMES_MAX, Group, RingShape, unpacked};
use super::land::{InRing, ReceiveRing};
use super::library::{Direction, Library, RankOf};
use super::messages::{
    BadMessage, MESSAGE_BYTES_MAX, NcclOffer, PATH, ToDecode, ToDecodeWire, ToPrefill, ToPrefillWire,
};
use super::rings::Rings;
use super::worker::{Plan, Running, State, Worker};
use crate::device::{DeviceFault, DeviceLimits};
use crate::receiver::{IncomingPair, Offered, PairError, REPLY_TIME_LIMIT, Receiver, StreamEnd, TakenStreams};
use crate::transports::grpc::receiver::caller_of;

/// Replies that wait for a sender which does not read. Then its messages are not read either.
const REPLIES_QUEUED_MAX: usize = 256;
/// Messages that have come behind an exchange which has not run yet. Then no more are read.
const WAITING_MAX: usize = 2 * FRAMES_MAX;

/// What a decode node gives to NCCL.
#[derive(Clone, Copy, Debug)]
pub(super) struct NcclConfig {
    /// The ring of each sender's communicator.
    pub ring: RingShape,
    pub has_checksums: bool,
    /// Communicators at the same time. A sender that comes then uses another transport. Their thread blocks fit a GPU together
    /// (`cuda_library.rs`).
    pub communicators_max: usize,
}

impl NcclConfig {
    /// For a node whose (block, layer) has `layer_bytes`. A slot has 2 MiB, which is a block of a large model. A ring has 32
    /// MiB, as that of shared memory: 3 ms of a 100 Gb/s link.
    pub fn new(layer_bytes: usize, has_checksums: bool) -> Self {
        const SLOT_BYTES: u32 = 2 << 20;
        Self {
            ring: RingShape {
                slots: 16,
                slot_bytes: u32::try_from(layer_bytes).unwrap_or(u32::MAX).max(SLOT_BYTES),
            },
            has_checksums,
            communicators_max: 16,
        }
    }
}

/// NCCL is served while this value lives. Dropping it ends every pair that uses it.
#[derive(Debug)]
pub(super) struct NcclServing {
    _offered: Offered,
    _streams: TakenStreams,
    _stop: DropGuard,
}

/// Offers NCCL to senders, and takes their control streams on the node's port. Needs a Tokio runtime around it.
pub(super) fn serve(
    receiver: &Arc<Receiver>,
    config: NcclConfig,
    (library, rings): (Arc<dyn Library>, Arc<Rings>),
) -> NcclServing {
    let offer = NcclOffer {
        version: library.version(),
        slots: config.ring.slots,
        slot_bytes: config.ring.slot_bytes,
        has_checksums: config.has_checksums,
    };
    let stop = CancellationToken::new();
    let parts = Parts {
        config,
        library,
        rings,
        room: Arc::new(Semaphore::new(config.communicators_max)),
        stop: stop.clone(),
        closed: receiver.closed.clone(),
    };
    let end = NcclEnd {
        receiver: receiver.clone(),
        parts,
    };
    NcclServing {
        _offered: receiver.offer(TransportOffer {
            transport: KIND.name().to_owned(),
            offer: offer.encode_to_vec().into(),
        }),
        _streams: receiver.take_streams(Arc::new(end)),
        _stop: stop.drop_guard(),
    }
}

#[derive(Debug)]
struct NcclEnd {
    receiver: Arc<Receiver>,
    parts: Parts,
}

/// What the task of a stream needs of its node.
#[derive(Clone, Debug)]
struct Parts {
    config: NcclConfig,
    library: Arc<dyn Library>,
    rings: Arc<Rings>,
    room: Arc<Semaphore>,
    stop: CancellationToken,
    /// The node has drained.
    closed: CancellationToken,
}

impl StreamEnd for NcclEnd {
    fn path(&self) -> &'static str {
        PATH
    }

    fn take(&self, call: Request<Body>) -> Response<Body> {
        let mut codec = ProstCodec::<ToPrefillWire, ToDecodeWire>::default();
        let caller = caller_of(call.extensions());
        let messages = Streaming::new_request(codec.decoder(), call.into_body(), None, Some(MESSAGE_BYTES_MAX));
        let (replies, queue) = mpsc::channel(REPLIES_QUEUED_MAX);
        let receiving = Receiving {
            pair: IncomingPair::new(&self.receiver, KIND, caller),
            end: self.parts.clone(),
            replies,
            waiting: VecDeque::new(),
            greeting: Greeting::Awaited,
            communicator: None,
            arriving: None,
        };
        // A task of its own, because it must finish a running copy when the connection drops.
        tokio::spawn(receiving.run(messages));
        let body = EncodeBody::new_server(
            codec.encoder(),
            ReceiverStream::new(queue),
            None,
            SingleMessageCompressionOverride::default(),
            Some(MESSAGE_BYTES_MAX),
        );
        let mut response = Response::new(Body::new(body));
        response.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
        response
    }
}

/// One pair.
struct Receiving {
    pair: IncomingPair,
    end: Parts,
    replies: mpsc::Sender<Result<ToPrefillWire, Status>>,
    /// Messages in their order, behind the exchange that is arriving.
    waiting: VecDeque<ToDecode>,
    greeting: Greeting,
    communicator: Option<Communicator>,
    arriving: Option<Arriving>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Greeting {
    Awaited,
    Done,
}

struct Communicator {
    worker: Worker,
    ring: Arc<ReceiveRing>,
    is_made: bool,
    /// Its part of the node's communicators.
    _permit: OwnedSemaphorePermit,
}

/// An exchange that has been posted.
struct Arriving {
    group: Group,
    running: Running,
}

#[allow(clippy::large_enum_variant, reason = "one lives at a time, on the stack")]
enum Event {
    Stop,
    Reply(KvReply),
    Worker(State),
    Arrived,
    Came(Result<Option<ToDecodeWire>, Status>),
}

/// Why this side ends a pair.
#[derive(Debug, Error)]
enum PairEnd {
    /// The sender is gone, or this node is leaving. Nothing is said.
    #[error("it is over")]
    Over,
    #[error("{0}")]
    Pair(#[from] PairError),
    #[error("a message breaks the contract: {0}")]
    BadMessage(#[from] BadMessage),
    #[error("an exchange breaks the contract: {0}")]
    BadGroup(#[from] BadGroup),
    #[error("{0}")]
    Contract(&'static str),
    #[error("it does not read its replies")]
    NotReading,
    #[error("this node has as many communicators as it may")]
    NoRoom,
    #[error("{0}")]
    Ended(Arc<Ending>),
}

impl From<Ending> for PairEnd {
    fn from(ending: Ending) -> Self {
        PairEnd::Ended(Arc::new(ending))
    }
}

impl Receiving {
    async fn run(mut self, mut messages: Streaming<ToDecodeWire>) {
        let end = loop {
            let event = self.next(&mut messages).await;
            if let Err(end) = self.apply(event).await {
                break end;
            }
        };
        if matches!(end, PairEnd::Over) {
            return;
        }
        tracing::warn!(%end, "a sender by NCCL is given up");
        self.communicator = None;
        if matches!(end, PairEnd::NotReading) {
            // It would not read why.
            return;
        }
        let last = match &end {
            PairEnd::Pair(error) => error.last_reply().map(ToPrefill::Reply),
            end => Some(ToPrefill::Ended(end.to_string())),
        };
        let (replies, status) = (self.replies.clone(), Status::failed_precondition(end.to_string()));
        let last_words = async {
            if let Some(last) = last {
                let _ = replies.send(Ok(last.into())).await;
            }
            let _ = replies.send(Err(status)).await;
        };
        let _ = tokio::time::timeout(REPLY_TIME_LIMIT, last_words).await;
    }

    async fn next(&mut self, messages: &mut Streaming<ToDecodeWire>) -> Event {
        let has_room = self.waiting.len() < WAITING_MAX;
        tokio::select! {
            biased;
            // The sender is gone, so nobody reads replies.
            () = self.replies.closed() => Event::Stop,
            // Before the end, because a committed transfer must be acknowledged.
            reply = self.pair.next_reply() => Event::Reply(reply),
            () = self.end.stop.cancelled() => Event::Stop,
            () = self.end.closed.cancelled() => Event::Stop,
            state = next_state(&mut self.communicator) => Event::Worker(state),
            () = arrived(&mut self.arriving) => Event::Arrived,
            came = messages.message(), if has_room => Event::Came(came),
        }
    }

    async fn apply(&mut self, event: Event) -> Result<(), PairEnd> {
        match event {
            Event::Stop => return Err(PairEnd::Over),
            Event::Reply(reply) => self.say(ToPrefill::Reply(reply)).await?,
            Event::Worker(State::Making) => {}
            Event::Worker(State::Ready) => {
                if let Some(communicator) = &mut self.communicator {
                    communicator.is_made = true;
                }
                self.say(ToPrefill::Ready).await?;
            }
            Event::Worker(State::Ended(ending)) => return Err(PairEnd::Ended(ending)),
            Event::Arrived => self.land().await?,
            Event::Came(came) => {
                // A stream that broke, or that the sender has ended.
                let wire = came.ok().flatten().ok_or(PairEnd::Over)?;
                let message = ToDecode::try_from(wire)?;
                if matches!(message, ToDecode::Group(_)) && self.arriving.is_some() {
                    return Err(PairEnd::Contract("an exchange came before the last one had landed"));
                }
                self.waiting.push_back(message);
            }
        }
        self.advance().await
    }

    /// Takes the messages in their order. An exchange that has not run holds up those behind it.
    async fn advance(&mut self) -> Result<(), PairEnd> {
        while self.arriving.is_none() {
            let Some(message) = self.waiting.pop_front() else {
                return Ok(());
            };
            match message {
                ToDecode::Frame(frame) => self.frame(frame).await?,
                _ if self.greeting == Greeting::Awaited => return Err(PairError::NoHello.into()),
                ToDecode::Want => self.make().await?,
                ToDecode::Group(group) => {
                    self.receive(group)?;
                    // Frames without a byte need no exchange.
                    if self
                        .arriving
                        .as_ref()
                        .is_some_and(|arriving| arriving.running.is_over())
                    {
                        self.land().await?;
                    }
                }
            }
        }
        Ok(())
    }

    async fn frame(&mut self, frame: KvFrame) -> Result<(), PairEnd> {
        let reply = self.pair.frame(frame).await?;
        // The first frame was a good hello, or this line is not reached.
        self.greeting = Greeting::Done;
        match reply {
            Some(reply) => self.say(ToPrefill::Reply(reply)).await,
            None => Ok(()),
        }
    }

    /// The pair is wanted: mints an id, and begins to make this node's rank.
    async fn make(&mut self) -> Result<(), PairEnd> {
        if self.communicator.is_some() {
            return Err(PairEnd::Contract("a second communicator was asked for"));
        }
        let permit = self.end.room.clone().try_acquire_owned();
        let permit = permit.map_err(|_| PairEnd::NoRoom)?;
        let (library, rings, config) = (self.end.library.clone(), self.end.rings.clone(), self.end.config);
        let bytes = usize::try_from(config.ring.bytes()).unwrap_or(usize::MAX);
        let making = tokio::task::spawn_blocking(move || {
            let memory = rings.take(bytes)?;
            let ring = ReceiveRing::new(memory, config.has_checksums)?;
            Ok::<_, DeviceFault>((ring, library.mint()))
        });
        let limits: DeviceLimits = self.end.rings.kv().limits();
        let made = tokio::time::timeout(limits.communicator_wait, making).await;
        let made = made.map_err(|_| Ending::NotMade {
            waited: limits.communicator_wait,
            error: None,
            listener: None,
        })?;
        // The work does not panic, so the runtime is ending.
        let (ring, id) = made.map_err(|_| PairEnd::Over)?.map_err(Ending::Device)?;
        let id = id.map_err(Ending::Library)?;
        let kv = self.end.rings.kv().clone();
        let worker = Worker::start(Plan {
            library: self.end.library.clone(),
            id,
            rank: RankOf::Decode,
            held: ring.clone(),
            limits,
            keep: Arc::new(move |what| kv.keep(what)),
        })?;
        self.communicator = Some(Communicator {
            worker,
            ring,
            is_made: false,
            _permit: permit,
        });
        self.say(ToPrefill::Id(id)).await
    }

    /// Posts an exchange, in the order in which it was announced.
    fn receive(&mut self, group: Group) -> Result<(), PairEnd> {
        group.check(self.end.config.ring)?;
        let communicator = self.communicator.as_ref().filter(|communicator| communicator.is_made);
        let Communicator { worker, ring, .. } =
            communicator.ok_or(PairEnd::Contract("an exchange came before the communicator"))?;
        let runs = unpacked(ring.at(), &group.run_bytes);
        let running = worker.exchange(Direction::Receive, runs);
        self.arriving = Some(Arriving { group, running });
        Ok(())
    }

    /// The bytes of an exchange are in the ring: every frame is taken or refused.
    async fn land(&mut self) -> Result<(), PairEnd> {
        let (Some(arrived), Some(communicator)) = (self.arriving.take(), &self.communicator) else {
            return Ok(());
        };
        let ring = communicator.ring.clone();
        let mut at = ring.at();
        for (header, bytes) in arrived.group.blocks {
            let bytes = bytes as usize;
            let data = InRing {
                ring: ring.clone(),
                at,
                bytes,
            };
            at = at.offset(bytes);
            if let Some(refused) = self.pair.block(header, data).await? {
                self.say(ToPrefill::Reply(refused)).await?;
            }
        }
        self.say(ToPrefill::Landed).await
    }

    async fn say(&mut self, message: ToPrefill) -> Result<(), PairEnd> {
        let said = tokio::time::timeout(REPLY_TIME_LIMIT, self.replies.send(Ok(message.into()))).await;
        said.map_err(|_| PairEnd::NotReading)?.map_err(|_| PairEnd::Over)
    }
}

async fn next_state(communicator: &mut Option<Communicator>) -> State {
    match communicator {
        Some(communicator) => communicator.worker.next_state().await,
        None => std::future::pending().await,
    }
}

async fn arrived(arriving: &mut Option<Arriving>) {
    match arriving {
        Some(arriving) => arriving.running.over().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
