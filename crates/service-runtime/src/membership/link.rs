//! The stream to one coordinator over all its lives: dial, register, report, listen, dial again.

use std::sync::Arc;
use std::time::Duration;

use identity::{Expected, Identity};
use proto::messages::{CONTROL_MESSAGE_BYTES_MAX, CoordinatorReport, NodeReport};
use proto::v1;
use proto::v1::membership_service_client::MembershipServiceClient;
use rand::Rng as _;
use serving_core::kv::prefix_log::{LogPosition, PrefixLog};
use serving_core::node::{NodeRecord, NodeState, NodeStatus};
use serving_core::scheduler::permit_shares::ShareId;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::shared::Shared;
use super::silence::Silence;
use super::trouble::{Trouble, Word};
use super::{LEAVE_TIME_LIMIT, LostReason, MembershipEvent};
use crate::clock_offset;
use crate::serve;
use crate::shutdown::Shutdown;

/// Two statuses within this time are sent as one, because under load every step changes the status.
const COALESCE: Duration = Duration::from_millis(2);
/// Reports that wait for the stream. A coordinator that does not read holds this many and no more.
const REPORTS_QUEUED_MAX: usize = 8;
/// Used until the coordinator has said how often it wants a status.
const FIRST_ANSWER_TIME_LIMIT: Duration = Duration::from_secs(5);

/// The stream to one coordinator, over all its lives.
pub(super) struct Link {
    pub id: ShareId,
    pub address: String,
    pub record: NodeRecord,
    pub status: watch::Receiver<NodeStatus>,
    pub prefixes: watch::Receiver<PrefixLog>,
    pub events: mpsc::Sender<MembershipEvent>,
    /// Ends this link alone, or all links.
    pub leave: Shutdown,
    pub shared: Arc<Shared>,
    pub identity: Identity,
    /// Whether a stream is open.
    pub is_welcome: watch::Sender<bool>,
}

impl Link {
    fn is_leaving(&self) -> bool {
        self.leave.is_requested() || self.status.borrow().state == NodeState::Draining
    }

    pub(super) async fn keep(mut self) {
        let mut trouble = Trouble::new(Instant::now());
        while !self.leave.is_requested() {
            let mut was_welcome = false;
            let Err(reason) = self.one_stream(&mut was_welcome).await else {
                return;
            };
            if was_welcome {
                trouble = Trouble::new(Instant::now());
            }
            match was_welcome {
                // One side has told the other that the stream ends.
                true if reason == LostReason::Ended || self.is_leaving() => {
                    tracing::info!(coordinator = %self.address, %reason, "the coordinator's stream ended");
                }
                true => tracing::warn!(coordinator = %self.address, %reason, "lost the coordinator; dialling again"),
                false => self.tell_trouble(trouble.failed(Instant::now(), &reason), &reason),
            }
            let pause = trouble.pause(&reason).mul_f64(rand::rng().random_range(0.5..1.0));
            let lost = MembershipEvent::ConnectionLost {
                address: self.address.clone(),
                reason,
            };
            if self.events.send(lost).await.is_err() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.leave.requested() => {}
            }
        }
    }

    fn tell_trouble(&self, word: Word, reason: &LostReason) {
        let coordinator = &self.address;
        match word {
            Word::Nothing => tracing::debug!(%coordinator, %reason, "no coordinator yet"),
            Word::Refused => tracing::error!(%coordinator, %reason, "not a member; trying again now and then"),
            Word::NoCoordinator { waited, tries } => tracing::warn!(
                %coordinator, tries, waited_s = waited.as_secs(), %reason,
                "no coordinator answers: start it, or correct `coordinators`; dialling on"
            ),
        }
    }

    /// One stream from its start to its end. `Ok` only after a clean leave.
    async fn one_stream(&mut self, was_welcome: &mut bool) -> Result<(), LostReason> {
        let connect = |error: &dyn std::fmt::Display| LostReason::Connect(error.to_string());
        let endpoint = serve::endpoint(&self.address).map_err(|error| connect(&error))?;
        let channel = self.identity.connect(endpoint, Expected::Coordinator).await;
        let channel = channel.map_err(LostReason::Connect)?;
        let mut client = MembershipServiceClient::new(channel)
            .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
            .max_encoding_message_size(CONTROL_MESSAGE_BYTES_MAX);
        let (reports, queue) = mpsc::channel(REPORTS_QUEUED_MAX);
        let mut record = self.record.clone();
        record.state = self.status.borrow().state;
        let register = NodeReport::Register(record).into();
        reports.send(register).await.map_err(|_| LostReason::Ended)?;
        let clock = client.clone();
        let opening = client.join(ReceiverStream::new(queue));
        let opened = tokio::time::timeout(FIRST_ANSWER_TIME_LIMIT, opening).await;
        let silent = LostReason::Silent {
            silent_ms: FIRST_ANSWER_TIME_LIMIT.as_millis() as u64,
        };
        let response = opened.map_err(|_| silent)?.map_err(|status| LostReason::of(&status))?;
        let (shared, id) = (self.shared.clone(), self.id);
        let _measuring = clock_offset::measure(clock, reports.clone(), move |offset| shared.note_clock(id, offset));
        let mut stream = Stream {
            link: self,
            reports,
            incoming: response.into_inner(),
            timing: None,
            silence: Silence::since(Instant::now()),
            reported: Instant::now(),
            prefixes_told: None,
        };
        let ended = stream.talk().await;
        *was_welcome = stream.timing.is_some();
        if *was_welcome {
            self.is_welcome.send_replace(false);
            self.shared.disconnect(self.id);
        }
        ended
    }
}

/// What the welcome fixes for a stream.
#[derive(Clone, Copy, Debug)]
struct Timing {
    lease: Duration,
    status_interval: Duration,
    takes_prefixes: bool,
}

struct Stream<'a> {
    link: &'a mut Link,
    reports: mpsc::Sender<v1::NodeReport>,
    incoming: tonic::Streaming<v1::CoordinatorReport>,
    /// `None` until the welcome.
    timing: Option<Timing>,
    silence: Silence,
    reported: Instant,
    /// `None` until the whole list of the node's prefixes has been sent.
    prefixes_told: Option<LogPosition>,
}

impl Stream<'_> {
    async fn talk(&mut self) -> Result<(), LostReason> {
        let leave = self.link.leave.clone();
        let mut status = self.link.status.clone();
        let mut divided_anew = self.link.shared.divided_anew();
        let mut is_stale = true;
        let mut is_last = false;
        loop {
            let silence_limit = self.timing.map_or(FIRST_ANSWER_TIME_LIMIT, |timing| timing.lease);
            let silence_end = self.silence.end(silence_limit);
            let next_report = match (self.timing, is_stale) {
                (Some(_), true) => self.reported + COALESCE,
                (Some(timing), false) => self.reported + timing.status_interval,
                (None, _) => silence_end,
            };
            tokio::select! {
                // What the coordinator has said counts before its silence. A message that is still in the socket when a node goes on after
                // a standstill is not here yet: the connection's own task has to read it first. For that there is a grace (`silence.rs`).
                biased;
                () = leave.requested() => return self.say_goodbye().await,
                report = self.incoming.message() => {
                    let report = report.map_err(|status| LostReason::of(&status))?.ok_or(LostReason::Ended)?;
                    self.silence = Silence::since(Instant::now());
                    self.take(report.try_into().map_err(LostReason::Contract)?).await?;
                }
                changed = status.changed(), if !is_stale && !is_last => match changed {
                    Ok(()) => is_stale = true,
                    // The node has drained and is about to say goodbye. The stream has to be open for that.
                    Err(_) => is_last = true,
                },
                _ = divided_anew.changed(), if !is_stale => is_stale = true,
                () = tokio::time::sleep_until(next_report), if self.timing.is_some() => {
                    self.report_prefixes()?;
                    let current = self.link.shared.seen_by(self.link.id, &mut status);
                    self.report(current)?;
                    is_stale = false;
                }
                () = tokio::time::sleep_until(silence_end) => {
                    if self.silence.is_over(Instant::now(), silence_limit) {
                        return Err(LostReason::Silent { silent_ms: silence_limit.as_millis() as u64 });
                    }
                }
            }
        }
    }

    /// A full queue means that the coordinator does not read. This status is skipped; the next one is newer anyway.
    fn report(&mut self, status: NodeStatus) -> Result<(), LostReason> {
        let epoch = self.link.record.id.epoch;
        self.reported = Instant::now();
        match self.reports.try_send(NodeReport::Status { epoch, status }.into()) {
            Ok(()) | Err(mpsc::error::TrySendError::Full(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(LostReason::Ended),
        }
    }

    /// Sent before the status, which brings the permits, and as often: a changed cache is a changed status. The last place
    /// of the queue is kept for the status, which renews the lease; the cache can be sent next time.
    fn report_prefixes(&mut self) -> Result<(), LostReason> {
        let is_wanted = self.timing.is_some_and(|timing| timing.takes_prefixes);
        if !is_wanted || self.reports.capacity() < 2 {
            return Ok(());
        }
        let Some((report, told)) = self.link.prefixes.borrow().since(self.prefixes_told) else {
            return Ok(());
        };
        match self.reports.try_send(NodeReport::Prefixes(report).into()) {
            Ok(()) => self.prefixes_told = Some(told),
            Err(mpsc::error::TrySendError::Full(_)) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(LostReason::Ended),
        }
        Ok(())
    }

    async fn take(&mut self, report: CoordinatorReport) -> Result<(), LostReason> {
        match report {
            CoordinatorReport::Welcome(welcome) => {
                self.timing = Some(Timing {
                    lease: welcome.lease,
                    status_interval: welcome.status_interval,
                    takes_prefixes: welcome.takes_prefixes,
                });
                self.link.shared.connect(self.link.id, welcome.coordinator.epoch);
                self.link.is_welcome.send_replace(true);
                tracing::info!(coordinator = %welcome.coordinator, address = %self.link.address, "joined");
                let address = self.link.address.clone();
                self.tell(MembershipEvent::Welcomed {
                    coordinator: welcome.coordinator,
                    address,
                })
                .await
            }
            CoordinatorReport::Renewed { lease } => {
                if let Some(timing) = &mut self.timing {
                    timing.lease = lease;
                }
                Ok(())
            }
            CoordinatorReport::Peers(peers) => {
                self.link.shared.set_peers(self.link.id, peers);
                Ok(())
            }
            CoordinatorReport::RegisterRefused { reason, detail } => Err(LostReason::Refused { reason, detail }),
            CoordinatorReport::Drain { reason, next_role } => {
                self.tell(MembershipEvent::DrainRequested { reason, next_role }).await
            }
            CoordinatorReport::Permits(note) => {
                self.link.shared.note(self.link.id, note, &self.link.status);
                Ok(())
            }
        }
    }

    async fn tell(&self, event: MembershipEvent) -> Result<(), LostReason> {
        self.link.events.send(event).await.map_err(|_| LostReason::Ended)
    }

    async fn say_goodbye(&mut self) -> Result<(), LostReason> {
        let link = &mut *self.link;
        let mut status = link.shared.seen_by(link.id, &mut link.status);
        status.state = NodeState::Draining;
        self.report(status)?;
        let leave = NodeReport::Leave {
            reason: "drained".to_owned(),
        };
        let _ = self.reports.send(leave.into()).await;
        // The coordinator ends the stream when it has read the goodbye.
        let ended = async { while let Ok(Some(_)) = self.incoming.message().await {} };
        let _ = tokio::time::timeout(LEAVE_TIME_LIMIT / 2, ended).await;
        Ok(())
    }
}
