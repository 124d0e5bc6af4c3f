//! A node's end of the legs: work comes in, is let in or refused, is cancelled; tokens go out.

use std::time::Duration;

use serving_core::cluster::{LegError, LegEvent, RefuseReason};
use serving_core::ids::{NodeEpoch, TransferId};
use serving_core::request::{AttemptKey, TokenEvent};
use serving_core::scheduler::{Admission, Admitted, PushPlan, Refusal, Work};

use super::World;
use super::agenda::{LegWork, Place, StartLeg, ToNode};
use super::node::{Stream, block_bytes};
use crate::arithmetic::keyed;

/// How often a leg tells the brain that tokens still come (`coordinator/src/dispatch.rs`).
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);
/// The one coordinator's life.
pub(super) const COORDINATOR: NodeEpoch = NodeEpoch(1);

impl World<'_> {
    pub(super) fn admit(&mut self, node: usize, start: StartLeg) {
        let StartLeg {
            key,
            request,
            permits,
            work,
        } = start;
        let leg = work.leg();
        if self.nodes[node].draining.is_some() {
            let reason = RefuseReason::Draining;
            return self.tell((key, leg), LegEvent::Refused { leg, reason });
        }
        let is_streamed = self.scenario.costs.link.is_streamed;
        let scheduled = match &work {
            LegWork::Prefill(ticket) => Work::Prefill(ticket.as_ref().map(|ticket| PushPlan {
                skip_blocks: ticket.prefix_blocks,
                is_streamed,
            })),
            LegWork::Decode => Work::Decode(self.mint()),
            LegWork::Whole => Work::Whole,
        };
        let admission = Admission {
            request,
            attempt: key.attempt,
            permits,
            coordinator: COORDINATOR,
            work: scheduled,
        };
        let now = self.now();
        match self.nodes[node].scheduler.admit(now, admission) {
            Ok(admitted) => self.admitted(node, (key, scheduled), (work, &admitted)),
            Err(refusal) => {
                let reason = reason_of(&refusal);
                self.tell((key, leg), LegEvent::Refused { leg, reason });
            }
        }
        self.deliver(node);
        self.tick_soon(node);
        self.turn_soon(node);
    }

    fn mint(&mut self) -> TransferId {
        self.next_transfer += 1;
        let number = self.next_transfer;
        TransferId(u128::from(keyed(self.scenario.seed, 0, number)) << 64 | u128::from(number))
    }

    fn admitted(&mut self, node: usize, (key, work): (AttemptKey, Work), (asked, admitted): (LegWork, &Admitted)) {
        let leg = asked.leg();
        let mut stream = Stream {
            leg,
            ticket: None,
            receives: None,
            tokens: Vec::new(),
            told_at: None,
            untold: 0,
        };
        let now = self.now();
        let event = match asked {
            LegWork::Prefill(ticket) => {
                stream.ticket = ticket;
                if let Some(live) = self.live_attempt(key) {
                    live.accepted(now);
                    live.cached(admitted.cached_tokens);
                }
                LegEvent::PrefillAccepted
            }
            LegWork::Decode | LegWork::Whole => {
                let ticket = match work {
                    Work::Decode(transfer) => {
                        stream.receives = Some(transfer);
                        self.nodes[node].receiving.insert(transfer, key);
                        Some(self.ticket(node, transfer, admitted))
                    }
                    Work::Prefill(_) | Work::Whole => None,
                };
                if let Some(live) = self.live_attempt(key) {
                    live.cached(admitted.cached_tokens);
                }
                LegEvent::Opened { ticket }
            }
        };
        self.nodes[node].streams.insert(key, stream);
        self.tell((key, leg), event);
    }

    fn ticket(&self, node: usize, transfer: TransferId, admitted: &Admitted) -> serving_core::node::Ticket {
        let id = self.nodes[node].id(self.scenario.seed);
        serving_core::node::Ticket {
            transfer,
            decode_address: id.name.to_string(),
            decode_node: id,
            blocks: admitted.ticket_blocks.clone(),
            prefix_blocks: admitted.prefix_blocks,
            total_bytes: block_bytes(self.scenario) * admitted.ticket_blocks.len() as u64,
            expires_in: self.scenario.nodes.reservation,
        }
    }

    /// The leg's stream was closed.
    pub(super) fn cancel(&mut self, node: usize, key: AttemptKey) {
        let own = &mut self.nodes[node];
        if own.streams.contains_key(&key) {
            own.scheduler.cancel(key);
            self.close(node, key);
            self.deliver(node);
            self.turn_soon(node);
        }
    }

    /// The last of a request here.
    pub(super) fn close(&mut self, node: usize, key: AttemptKey) {
        let own = &mut self.nodes[node];
        let stream = own.streams.remove(&key);
        if let Some(transfer) = stream.and_then(|stream| stream.receives) {
            own.receiving.remove(&transfer);
        }
    }

    /// The request in the coordinator's shell, while this attempt of it is the one that counts.
    pub(super) fn live_attempt(&mut self, key: AttemptKey) -> Option<&mut super::request::Live> {
        let live = self.live.get_mut(&key.request)?;
        (live.attempt == Some(key.attempt)).then_some(live)
    }

    /// Tokens leave a node: the client's times are noted, and the brain hears of the first one, and then now and then.
    pub(super) fn send_tokens(&mut self, (node, key): (usize, AttemptKey), tokens: &[TokenEvent]) {
        let (now, arrives) = (self.now(), self.now() + self.hop);
        let Some(live) = self.live_attempt(key) else {
            return;
        };
        for token in tokens {
            live.token(token.index.0, arrives);
        }
        let Some(stream) = self.nodes[node].streams.get_mut(&key) else {
            return;
        };
        let leg = stream.leg;
        stream.untold += u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let event = match stream.told_at {
            None => LegEvent::FirstToken { leg },
            Some(told) if now.since(told) >= PROGRESS_INTERVAL => return self.tell_count((node, key)),
            Some(_) => return,
        };
        stream.told_at = Some(now);
        self.tell((key, leg), event);
    }

    /// How many tokens left the node since the last time.
    pub(super) fn tell_count(&mut self, (node, key): (usize, AttemptKey)) {
        let now = self.now();
        let Some(stream) = self.nodes[node]
            .streams
            .get_mut(&key)
            .filter(|stream| stream.untold > 0)
        else {
            return;
        };
        stream.told_at = Some(now);
        let (leg, count) = (stream.leg, std::mem::take(&mut stream.untold));
        self.tell((key, leg), LegEvent::TokensDelivered { leg, count });
    }

    /// Nobody is there, or another life: what would have been answered.
    pub(super) fn reaches_nobody(&mut self, place: Place, what: ToNode) {
        let ToNode::Leg(start) = what else {
            return;
        };
        let (leg, node) = (start.work.leg(), &self.nodes[place.node]);
        let event = match node.is_alive {
            true => LegEvent::Refused {
                leg,
                reason: RefuseReason::StaleEpoch,
            },
            false => LegEvent::Failed {
                leg,
                error: LegError::Unreachable {
                    detail: "connection refused".to_owned(),
                },
            },
        };
        self.tell((start.key, leg), event);
    }
}

/// As `proto` puts it on the wire.
fn reason_of(refusal: &Refusal) -> RefuseReason {
    match refusal {
        Refusal::NoBlocks { .. } | Refusal::TooManySequences { .. } | Refusal::Preempting => RefuseReason::NoCapacity,
        Refusal::Duplicate => RefuseReason::Duplicate,
        Refusal::NeverFits { .. } | Refusal::Invalid(_) => RefuseReason::Invalid,
    }
}
