//! Replay: the recorded events go to a fresh core, and its actions are compared with the recorded ones, event by event.

use std::collections::{BTreeMap, VecDeque};
use std::io::Read;
use std::panic::{self, AssertUnwindSafe};
use std::time::Duration;

use serde::Serialize;
use serving_core::cluster::{Cluster, ClusterAction, ClusterEvent};
use serving_core::ids::RequestId;
use serving_core::time::Time;
use thiserror::Error;

use super::read::{self, Ending, Entry, Reader, RecordedEvent};
use super::{RecordError, describe, write};

/// Events before a difference that are shown with it.
const CONTEXT_EVENTS: usize = 5;
/// Placeholders of the prompts of all unfinished requests: 256 MiB. A coordinator with 4,000 requests of 8,000 tokens needs half.
const UNFINISHED_TOKENS_MAX: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, Default)]
pub struct ReplayOptions {
    /// Stop before the first event that comes later than this after the first event.
    pub until: Option<Duration>,
    /// How many of the last events to show.
    pub shown_max: usize,
}

/// What a replay found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Replay {
    pub events: u64,
    pub actions: u64,
    /// Events whose replayed actions are all equal to the recorded ones, in the same order.
    pub equal_events: u64,
    /// Of all events: something broke, or somebody went away.
    pub faults: u64,
    pub events_by_kind: BTreeMap<&'static str, u64>,
    /// From the first event to the last one.
    pub span: Duration,
    /// After it the core is in another state than it was, so later differences may follow from it.
    pub first_difference: Option<Difference>,
    pub shown: Vec<Shown>,
    /// `None`: the replay stopped before the end.
    pub ending: Option<Ending>,
}

impl Replay {
    pub fn is_equal(&self) -> bool {
        self.equal_events == self.events
    }
}

/// The first event that was answered otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The event, with the recorded actions.
    pub at: Shown,
    pub replayed_actions: Vec<String>,
    /// The events before it.
    pub before: Vec<Shown>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shown {
    /// Counted from 0.
    pub index: u64,
    /// After the first event.
    pub at: Duration,
    pub event: String,
    pub actions: Vec<String>,
}

#[derive(Debug, Error)]
pub enum ReplayError {
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(
        "event {index}, {} ms after the first one, makes the core panic. When a coordinator wrote it, this is an error of baton: report it with the record",
        at.as_millis()
    )]
    CorePanicked { index: u64, at: Duration },
    #[error(
        "at event {index} the prompts of all unfinished requests have more than {UNFINISHED_TOKENS_MAX} tokens: no coordinator wrote that"
    )]
    TooManyTokens { index: u64 },
    #[error("the actions of event {index} cannot be encoded: {source}")]
    NotEncodable { index: u64, source: postcard::Error },
}

/// Replays a record.
///
/// # Errors
/// The record cannot be read, or its events are such as no coordinator has.
pub fn replay<R: Read>(mut reader: Reader<R>, options: ReplayOptions) -> Result<Replay, ReplayError> {
    let mut course = Course::new(Cluster::new(reader.header().config.clone()), options);
    while let Some(entry) = reader.next_entry()? {
        let Entry::Event(event) = entry else { continue };
        if course.is_beyond(&event) {
            return Ok(course.into_replay(None));
        }
        course.take(*event)?;
    }
    Ok(course.into_replay(reader.ending()))
}

/// A replay on its way.
struct Course {
    cluster: Cluster,
    options: ReplayOptions,
    first_at: Option<Time>,
    replay: Replay,
    last: VecDeque<Kept>,
    unfinished: UnfinishedTokens,
    actions: Vec<u8>,
}

impl Course {
    fn new(cluster: Cluster, options: ReplayOptions) -> Self {
        Self {
            cluster,
            options,
            first_at: None,
            replay: Replay::default(),
            last: VecDeque::new(),
            unfinished: UnfinishedTokens::default(),
            actions: Vec::new(),
        }
    }

    fn since_first(&self, at: Time) -> Duration {
        at.since(self.first_at.unwrap_or(at))
    }

    fn is_beyond(&self, event: &RecordedEvent) -> bool {
        self.options
            .until
            .is_some_and(|until| self.since_first(event.at) > until)
    }

    fn take(&mut self, recorded: RecordedEvent) -> Result<(), ReplayError> {
        self.first_at.get_or_insert(recorded.at);
        let index = self.replay.events;
        if !self.unfinished.has_room_for(&recorded.event) {
            return Err(ReplayError::TooManyTokens { index });
        }
        let (event, keys) = (recorded.event.clone(), recorded.keys.clone());
        let apply = || self.cluster.apply_again(recorded.at, event, keys);
        let Ok(actions) = panic::catch_unwind(AssertUnwindSafe(apply)) else {
            let at = self.since_first(recorded.at);
            return Err(ReplayError::CorePanicked { index, at });
        };
        self.unfinished.forget_ended(&actions);
        self.actions.clear();
        let encoded = write::encode_actions(&actions, &mut self.actions);
        encoded.map_err(|source| ReplayError::NotEncodable { index, source })?;
        self.count(&recorded, &actions);
        if self.actions == recorded.actions {
            self.replay.equal_events += 1;
        } else if self.replay.first_difference.is_none() {
            self.replay.first_difference = Some(Difference {
                at: self.shown(index, &recorded),
                replayed_actions: read::actions_as_text(&self.actions),
                before: self.last_shown(CONTEXT_EVENTS),
            });
        }
        self.last.push_back(Kept::of(index, recorded));
        if self.last.len() > self.options.shown_max.max(CONTEXT_EVENTS) {
            self.last.pop_front();
        }
        Ok(())
    }

    fn count(&mut self, recorded: &RecordedEvent, actions: &[ClusterAction]) {
        let span = self.since_first(recorded.at);
        let replay = &mut self.replay;
        replay.events += 1;
        replay.actions += actions.len() as u64;
        replay.faults += u64::from(recorded.is_fault());
        *replay
            .events_by_kind
            .entry(describe::kind(&recorded.event))
            .or_insert(0) += 1;
        replay.span = span;
    }

    fn shown(&self, index: u64, recorded: &RecordedEvent) -> Shown {
        Shown {
            index,
            at: self.since_first(recorded.at),
            event: describe::event(&recorded.event),
            actions: recorded.actions_as_text(),
        }
    }

    fn last_shown(&self, shown_max: usize) -> Vec<Shown> {
        let skipped = self.last.len().saturating_sub(shown_max);
        let shown = |kept: &Kept| Shown {
            index: kept.index,
            at: self.since_first(kept.at),
            event: kept.event.text(),
            actions: read::actions_as_text(&kept.actions),
        };
        self.last.iter().skip(skipped).map(shown).collect()
    }

    fn into_replay(mut self, ending: Option<Ending>) -> Replay {
        self.replay.shown = self.last_shown(self.options.shown_max);
        self.replay.ending = ending;
        self.replay
    }
}

/// An event that may have to be shown.
struct Kept {
    index: u64,
    at: Time,
    event: KeptEvent,
    actions: Vec<u8>,
}

/// Text costs time, and most events are never shown. A placeholder of a prompt costs memory.
enum KeptEvent {
    Whole(Box<ClusterEvent>),
    Text(String),
}

impl Kept {
    fn of(index: u64, recorded: RecordedEvent) -> Self {
        let has_prompt = matches!(
            recorded.event,
            ClusterEvent::RequestArrived { .. } | ClusterEvent::AttemptEnded { .. }
        );
        let event = match has_prompt {
            true => KeptEvent::Text(describe::event(&recorded.event)),
            false => KeptEvent::Whole(Box::new(recorded.event)),
        };
        Self {
            index,
            at: recorded.at,
            event,
            actions: recorded.actions,
        }
    }
}

impl KeptEvent {
    fn text(&self) -> String {
        match self {
            Self::Whole(event) => describe::event(event),
            Self::Text(text) => text.clone(),
        }
    }
}

/// Memory for placeholders of prompts. A file that somebody made up must not fill the machine.
#[derive(Debug, Default)]
struct UnfinishedTokens {
    by_request: BTreeMap<RequestId, u64>,
    total: u64,
}

impl UnfinishedTokens {
    fn has_room_for(&mut self, event: &ClusterEvent) -> bool {
        let (request, tokens) = match event {
            ClusterEvent::RequestArrived { request } => (request.id, u64::from(request.prompt_tokens())),
            ClusterEvent::AttemptEnded { key, delivered } => (key.request, delivered.tokens.len() as u64),
            _ => return true,
        };
        *self.by_request.entry(request).or_insert(0) += tokens;
        self.total += tokens;
        self.total <= UNFINISHED_TOKENS_MAX
    }

    fn forget_ended(&mut self, actions: &[ClusterAction]) {
        for action in actions {
            let (ClusterAction::Reject { request, .. }
            | ClusterAction::Fail { request, .. }
            | ClusterAction::Complete { request, .. }
            | ClusterAction::Forget { request }) = action
            else {
                continue;
            };
            self.total -= self.by_request.remove(request).unwrap_or(0);
        }
    }
}
