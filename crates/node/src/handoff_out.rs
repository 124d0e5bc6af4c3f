//! Pushes finished blocks to a decode node while later chunks are computed: one task per handoff, and one bounded queue for all.
//!
//! A handoff ends exactly once, with [`PushEnded`]: acknowledged, failed, or aborted. When this event is sent, nothing
//! reads the blocks any more, not even an export thread. The loop never waits for any of this.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kv_transfer::choice::TransportKind;
use kv_transfer::transport::{
    AbortReason, KvSource, PairFault, PushedBlock, SendTransfer, TransferError, TransferReport, TransferStart,
    Transport,
};
use service_runtime::clock::Clock;
use service_runtime::failpoints::{self, FaultPoint};
use service_runtime::telemetry::OpenSpan;
use service_runtime::telemetry::opentelemetry::trace::SpanKind;
use service_runtime::telemetry::opentelemetry::{Context, KeyValue};
use serving_core::node::Ticket;
use serving_core::request::{AttemptKey, TokenEvent};
use serving_core::scheduler::{PushBlock, PushEnd};
use serving_core::time::Time;
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::inbox::{HandoffSerial, Inbox, PushEnded, PushReport};
use crate::kv_access::KvAccess;
use crate::kv_source::TransferSource;
use crate::metrics::Metrics;

/// The blocks of all handoffs that wait to be pushed. Each block is held by its request, so the pool bounds their number. The limit here
/// only says when the node stops asking for work (PROTOCOL rule 7).
#[derive(Debug)]
pub struct PushQueue {
    blocks: AtomicUsize,
    blocks_max: usize,
}

impl PushQueue {
    pub fn new(blocks_max: usize) -> Self {
        Self {
            blocks: AtomicUsize::new(0),
            blocks_max,
        }
    }
    pub fn waiting_blocks(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }
    pub fn is_full(&self) -> bool {
        self.waiting_blocks() >= self.blocks_max
    }
    /// So many blocks wait no longer. True if the queue was full before and is not full any more. If several tasks take blocks out at the
    /// same moment, exactly one of them gets true.
    fn take_out(&self, count: usize) -> bool {
        let before = self.blocks.fetch_sub(count, Ordering::Relaxed);
        before >= self.blocks_max && before - count < self.blocks_max
    }
}

/// The blocks of one batch. Each counts in the queue until it is pushed or the batch is dropped.
#[derive(Debug)]
struct Queued {
    queue: Arc<PushQueue>,
    inbox: Arc<Inbox>,
    left: usize,
}

impl Queued {
    fn new(queue: Arc<PushQueue>, inbox: Arc<Inbox>, left: usize) -> Self {
        queue.blocks.fetch_add(left, Ordering::Relaxed);
        Self { queue, inbox, left }
    }
    fn one_pushed(&mut self) {
        self.take_out(1);
    }
    /// The loop grants no permits while the queue is full. It may be asleep, so it is told when there is room again.
    fn take_out(&mut self, count: usize) {
        self.left -= count;
        if self.queue.take_out(count) {
            self.inbox.wake();
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.take_out(self.left);
    }
}

#[derive(Debug)]
enum Work {
    Blocks(Vec<PushBlock>, Queued),
    Last(Vec<TokenEvent>),
}

/// What every handoff of a node needs.
#[derive(Clone, Debug)]
pub struct Handoffs {
    pub transport: Arc<dyn Transport>,
    pub kv: KvAccess,
    pub queue: Arc<PushQueue>,
    pub inbox: Arc<Inbox>,
    pub metrics: Metrics,
    pub runtime: Handle,
}

/// The loop's end of one handoff. Dropping it aborts the handoff.
#[derive(Debug)]
pub struct Handoff {
    pub serial: HandoffSerial,
    work: mpsc::Sender<Work>,
    abort: watch::Sender<Option<AbortReason>>,
    queue: Arc<PushQueue>,
    inbox: Arc<Inbox>,
    progress: Arc<Progress>,
    source: Arc<TransferSource>,
    driver: JoinHandle<()>,
}

/// When the last block left for the decode node, in nanoseconds of [`Time`]; 0 before the first block. Only the latest time counts, so
/// no queue to the loop is needed.
#[derive(Debug, Default)]
struct Progress(AtomicU64);

impl Progress {
    fn note(&self) {
        self.0.store(Clock::now().0, Ordering::Relaxed);
    }
}

impl Handoff {
    /// Never waits: the queue has room for every block of the ticket.
    pub fn push(&self, blocks: Vec<PushBlock>) {
        let queued = Queued::new(self.queue.clone(), self.inbox.clone(), blocks.len());
        // If the channel is closed, the handoff has failed and reports this itself.
        let _ = self.work.try_send(Work::Blocks(blocks, queued));
    }
    pub fn last(&self, first_tokens: Vec<TokenEvent>) {
        let _ = self.work.try_send(Work::Last(first_tokens));
    }
    pub fn abort(&self, reason: AbortReason) {
        self.abort.send_replace(Some(reason));
    }
    /// When the last block left for the decode node.
    pub fn progressed_at(&self) -> Option<Time> {
        match self.progress.0.load(Ordering::Relaxed) {
            0 => None,
            at => Some(Time(at)),
        }
    }
    /// Whether the task has ended, also by a panic, and nothing reads the blocks any more or ever will. This never waits: while a copy
    /// runs the answer is no.
    pub fn is_over(&self) -> bool {
        self.driver.is_finished() && self.source.try_close()
    }
}

/// One handoff to start.
#[derive(Debug)]
pub struct NewHandoff {
    pub key: AttemptKey,
    pub ticket: Ticket,
    /// Prompt tokens found in this node's prefix cache.
    pub cached_tokens: u32,
    /// The parent of the handoff's span.
    pub trace: Context,
}

impl Handoffs {
    /// Tells the decode node that the prefill begins. Returns at once.
    pub fn start(&self, new: NewHandoff) -> Handoff {
        // Every message but the last frame carries a block of the ticket.
        let (work, queued) = mpsc::channel(new.ticket.blocks.len() + 1);
        let (abort, aborted) = watch::channel(None);
        let new_trace = new.trace.clone();
        let serial = HandoffSerial::next();
        let progress: Arc<Progress> = Arc::default();
        let source = Arc::new(TransferSource::new(self.kv.clone()));
        let driver = Driver {
            serial,
            source: source.clone(),
            progress: progress.clone(),
            handoffs: self.clone(),
            new,
            work: queued,
            aborted,
            carrier: None,
            span: Some(OpenSpan::start("kv.send", SpanKind::Client, Clock::now(), &new_trace)),
            pushed_blocks: 0,
        };
        Handoff {
            serial,
            work,
            abort,
            queue: self.queue.clone(),
            inbox: self.inbox.clone(),
            progress,
            source,
            driver: self.runtime.spawn(driver.run()),
        }
    }
}

#[derive(Debug, Error)]
enum Stop {
    #[error("aborted: {}", .0.name())]
    Aborted(AbortReason),
    #[error("{0}")]
    Failed(#[from] TransferError),
}

/// The task of one handoff.
#[derive(Debug)]
struct Driver {
    serial: HandoffSerial,
    handoffs: Handoffs,
    new: NewHandoff,
    source: Arc<TransferSource>,
    progress: Arc<Progress>,
    work: mpsc::Receiver<Work>,
    aborted: watch::Receiver<Option<AbortReason>>,
    /// Known once a pair has taken the transfer.
    carrier: Option<TransportKind>,
    /// It is open until the end is known.
    span: Option<OpenSpan>,
    pushed_blocks: usize,
}

impl Driver {
    async fn run(mut self) {
        let driven = self.drive().await;
        let source = self.source.clone();
        // The lock waits for an export that is still copying: milliseconds, but not on an async thread.
        let _ = tokio::task::spawn_blocking(move || source.close()).await;
        self.count(&driven);
        self.end_span(&driven);
        let (end, report) = match driven {
            Ok(report) => (PushEnd::Acked, Some(self.report(&report))),
            Err(Stop::Aborted(_)) => (PushEnd::Aborted, None),
            Err(Stop::Failed(error)) => {
                let (reason, detail) = (error.name().to_owned(), error.to_string());
                (PushEnd::Failed { reason, detail }, None)
            }
        };
        self.handoffs.inbox.push_ended(PushEnded {
            key: self.new.key,
            serial: self.serial,
            end,
            report,
        });
    }

    /// Label in metrics and spans.
    fn transport(&self) -> &'static str {
        self.carrier.map_or("unsettled", TransportKind::name)
    }

    fn report(&self, report: &TransferReport) -> PushReport {
        PushReport {
            transport: self.transport(),
            kv_bytes: report.kv_bytes,
            moving: report.moving,
            last_written: report.last_written,
        }
    }

    async fn drive(&mut self) -> Result<TransferReport, Stop> {
        let transport = self.handoffs.transport.clone();
        let start = TransferStart {
            ticket: self.new.ticket.clone(),
            key: self.new.key,
            source: self.source.clone(),
            traceparent: self.span.as_ref().and_then(OpenSpan::traceparent),
            cached_tokens: self.new.cached_tokens,
        };
        let mut beginning = Box::pin(async move { transport.begin(start).await });
        let mut transfer = tokio::select! {
            biased;
            reason = aborted(&mut self.aborted) => {
                // Nothing reads the blocks yet, so they need not wait. The decode node is told all the same. The transport's own
                // limits on `begin` and `abort` bound this task.
                self.handoffs.runtime.spawn(async move {
                    if let Ok(transfer) = beginning.await {
                        transfer.abort(reason).await;
                    }
                });
                return Err(Stop::Aborted(reason));
            }
            transfer = &mut beginning => transfer?,
        };
        self.carrier = Some(transfer.transport());
        let sent = self.send(&mut *transfer).await;
        if let Err(Stop::Aborted(reason)) = &sent {
            // An export under way must be over before the abort counts as done.
            let source = self.source.clone();
            let _ = tokio::task::spawn_blocking(move || source.close()).await;
            transfer.abort(*reason).await;
        }
        sent
    }

    async fn send(&mut self, transfer: &mut dyn SendTransfer) -> Result<TransferReport, Stop> {
        loop {
            let work = tokio::select! {
                biased;
                reason = aborted(&mut self.aborted) => return Err(Stop::Aborted(reason)),
                work = self.work.recv() => work,
                // Before the last frame this is never an acknowledgement: the decode node refused or is gone.
                ended = transfer.acked() => return Ok(ended?),
            };
            match work {
                None => return Err(Stop::Aborted(aborted(&mut self.aborted).await)),
                Some(Work::Blocks(blocks, queued)) => self.push(transfer, (blocks, queued)).await?,
                Some(Work::Last(first_tokens)) => {
                    self.begin_span();
                    tokio::select! {
                        biased;
                        reason = aborted(&mut self.aborted) => return Err(Stop::Aborted(reason)),
                        written = transfer.last(first_tokens) => written?,
                    };
                    self.progress.note();
                    break;
                }
            }
        }
        // The hold deadline is the loop's timer: it aborts.
        let acked = tokio::select! {
            biased;
            reason = aborted(&mut self.aborted) => return Err(Stop::Aborted(reason)),
            acked = transfer.acked() => acked?,
        };
        match failpoints::hit(FaultPoint::Acked) {
            true => Err(Stop::Aborted(aborted(&mut self.aborted).await)),
            false => Ok(acked),
        }
    }

    /// The first bytes are about to move. The span's id is older: the decode node was told of it when the prefill began.
    fn begin_span(&mut self) {
        if self.pushed_blocks == 0
            && let Some(span) = &mut self.span
        {
            span.begin_at(Clock::now());
        }
    }

    async fn push(&mut self, transfer: &mut dyn SendTransfer, work: (Vec<PushBlock>, Queued)) -> Result<(), Stop> {
        let (blocks, mut queued) = work;
        self.begin_span();
        for PushBlock { ticket_index, block } in blocks {
            tokio::select! {
                biased;
                reason = aborted(&mut self.aborted) => return Err(Stop::Aborted(reason)),
                pushed = transfer.push(PushedBlock { ticket_index, block }) => pushed?,
            }
            queued.one_pushed();
            self.progress.note();
            self.pushed_blocks += 1;
            self.between_blocks()?;
        }
        Ok(())
    }

    /// Where a transfer's faults can be made to happen.
    fn between_blocks(&self) -> Result<(), Stop> {
        let all = self.new.ticket.blocks.len();
        let point = match self.pushed_blocks {
            n if n == all => FaultPoint::TransferNearlyDone,
            n if n == all.div_ceil(2) => FaultPoint::TransferHalf,
            1 => FaultPoint::TransferBegun,
            _ => return Ok(()),
        };
        if !failpoints::hit(point) {
            return Ok(());
        }
        let node = self.new.ticket.decode_node.clone();
        let fault = PairFault::Broken("a failpoint said so".to_owned());
        Err(TransferError::PairLost { node, fault }.into())
    }

    fn count(&self, driven: &Result<TransferReport, Stop>) {
        let (metrics, transport) = (&self.handoffs.metrics, self.transport());
        match driven {
            Ok(report) => metrics.handoff_done((transport, "handed_over"), report.kv_bytes, report.moving),
            // The decode node was the first to hear that the client has gone.
            Err(Stop::Failed(TransferError::AbortedByPeer { reason, .. }))
                if reason == AbortReason::Cancelled.name() =>
            {
                metrics.handoff(transport, AbortReason::Cancelled.name());
            }
            Err(Stop::Failed(error)) => metrics.transfer_failed(transport, error.name()),
            Err(Stop::Aborted(AbortReason::HoldExpired)) => metrics.transfer_failed(transport, "hold_expired"),
            Err(Stop::Aborted(reason)) => metrics.handoff(transport, reason.name()),
        }
    }

    fn end_span(&mut self, driven: &Result<TransferReport, Stop>) {
        let Some(mut span) = self.span.take() else { return };
        let ticket = &self.new.ticket;
        let mut attributes = vec![
            KeyValue::new("baton.transport", self.transport()),
            KeyValue::new("baton.transfer", ticket.transfer.label()),
            KeyValue::new("baton.decode_node", ticket.decode_node.name.as_str().to_owned()),
            KeyValue::new("baton.kv_blocks", ticket.blocks.len() as i64),
        ];
        let (end, error) = match driven {
            Ok(report) => {
                let seconds = report.moving.as_secs_f64().max(1e-9);
                let rate = report.kv_bytes as f64 / seconds / 1e9;
                attributes.push(KeyValue::new("baton.kv_bytes", report.kv_bytes as i64));
                attributes.push(KeyValue::new("baton.kv_layers", i64::from(self.source.layer_count())));
                attributes.push(KeyValue::new("baton.kv_gigabytes_per_second", rate));
                (Clock::time_of(report.last_written), None)
            }
            Err(stop) => (Clock::now(), Some(stop.to_string())),
        };
        span.set_attributes(attributes);
        span.end(end, error);
    }
}

/// Ends when the loop wants the handoff to end. A dropped handle is a cancel.
async fn aborted(aborted: &mut watch::Receiver<Option<AbortReason>>) -> AbortReason {
    match aborted.wait_for(Option::is_some).await {
        Ok(reason) => *reason,
        Err(_) => None,
    }
    .unwrap_or(AbortReason::Cancelled)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A wake-up that is lost is noticed after the whole time.
    fn is_woken(inbox: &Inbox) -> bool {
        let deadline = Clock::now() + Duration::from_secs(20);
        inbox.take(deadline);
        Clock::now() < deadline
    }

    #[test]
    fn the_loop_hears_of_room_in_the_queue_however_it_came() {
        let (queue, inbox) = (Arc::new(PushQueue::new(2)), Arc::<Inbox>::default());
        let batch = |blocks| Queued::new(queue.clone(), inbox.clone(), blocks);
        // The queue gets full while the first batch's only block is on its way.
        let mut first = batch(1);
        let second = batch(1);
        assert!(queue.is_full());
        first.one_pushed();
        assert!(!queue.is_full() && is_woken(&inbox));
        // A batch of a handoff that has ended is dropped.
        let third = batch(5);
        assert!(queue.is_full());
        drop(third);
        assert!(!queue.is_full() && is_woken(&inbox));
        drop((first, second));
        assert_eq!(queue.waiting_blocks(), 0);
    }
}
