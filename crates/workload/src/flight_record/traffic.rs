//! What a record says of the traffic and of the cluster, in the form in which they can be simulated again, changed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::time::Duration;

use serving_core::cluster::{ClusterConfig, ClusterEvent, LegEvent, PromptKeys};
use serving_core::ids::{NodeName, RequestId};
use serving_core::kv::prefix_log::PrefixKey;
use serving_core::node::{AssignedRole, NodeCapacity, NodeRecord};
use serving_core::request::{AttemptKey, Request};
use serving_core::time::Time;

use super::{Ending, Entry, Note, Reader, RecordError, RecordedEvent};
use crate::trace::{Trace, TraceRequest, block_count};

/// Requests that are kept in memory, each with 8 bytes for each of its blocks.
const REQUESTS_MAX: usize = 2_000_000;
const BLOCKS_MAX: usize = 64 << 20;

/// The traffic of one life of a coordinator, and what served it.
#[derive(Clone, Debug)]
pub struct Traffic {
    pub trace: Trace,
    /// Names of the nodes that joined in this life, by the role in which each joined first.
    pub nodes: BTreeMap<AssignedRole, BTreeSet<NodeName>>,
    /// The first decode node's; all are taken to be alike.
    pub capacity: NodeCapacity,
    pub config: ClusterConfig,
    /// From a request's arrival at the loop to its first token there, in milliseconds; of the requests that had one.
    pub ttft_ms: Vec<f64>,
    /// Events that are not simulated again: something broke, or somebody went away.
    pub faults: u64,
    /// Requests without a note of their length: they had not ended, or had been turned away. They are taken to be as long as they
    /// were allowed to be.
    pub of_unknown_length: usize,
    /// Requests whose prompts leave no room for an answer in what a node takes. They were turned away, and are not in the trace.
    pub too_long: usize,
    pub ending: Ending,
}

#[derive(Debug, thiserror::Error)]
pub enum TrafficError {
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("no request arrived in this record: there is no traffic to simulate")]
    NoRequests,
    #[error("no decode node joined in this record: there is no cluster to simulate")]
    NoDecodeNode,
    #[error(
        "each request of this record has a prompt of at least {max_model_tokens} tokens, which is all that a node of it takes: there is no traffic to simulate"
    )]
    AllTooLong { max_model_tokens: u32 },
    #[error(
        "the record has more than {REQUESTS_MAX} requests, or more than {BLOCKS_MAX} blocks of prompts: take a record of a shorter time"
    )]
    TooLarge,
}

/// Reads a record to its end.
///
/// # Errors
/// The record is damaged, or holds no traffic.
pub fn traffic<R: Read>(mut reader: Reader<R>) -> Result<Traffic, TrafficError> {
    let mut collected = Collected::default();
    while let Some(entry) = reader.next_entry()? {
        match entry {
            Entry::Event(recorded) => collected.take(&recorded)?,
            Entry::Note { note, .. } => collected.note(&note),
        }
    }
    let name = format!("flight record of {}", reader.header().coordinator);
    let config = reader.header().config.clone();
    collected.into_traffic((name, config), reader.ending().unwrap_or(Ending::Cut))
}

#[derive(Debug)]
struct Arrived {
    at: Time,
    prompt_tokens: u32,
    max_tokens: u32,
    choices: u32,
    lane: serving_core::request::Lane,
    keys: Option<PromptKeys>,
    first_token: Option<Time>,
    output_tokens: Option<u64>,
}

#[derive(Debug, Default)]
struct Collected {
    requests: Vec<(RequestId, Arrived)>,
    index: BTreeMap<RequestId, usize>,
    blocks: usize,
    nodes: BTreeMap<NodeName, AssignedRole>,
    capacity: Option<NodeCapacity>,
    faults: u64,
}

impl Collected {
    fn take(&mut self, recorded: &RecordedEvent) -> Result<(), TrafficError> {
        self.faults += u64::from(recorded.is_fault());
        let at = recorded.at;
        match &recorded.event {
            ClusterEvent::RequestArrived { request } => self.arrived(at, request, recorded.keys.as_ref())?,
            ClusterEvent::NodeJoined { record, .. } => self.joined(record),
            ClusterEvent::Leg {
                key,
                event: LegEvent::FirstToken { .. },
            } => self.first_token(at, *key),
            _ => {}
        }
        Ok(())
    }

    fn arrived(&mut self, at: Time, request: &Request, keys: Option<&PromptKeys>) -> Result<(), TrafficError> {
        self.blocks += keys.map_or(0, PromptKeys::blocks);
        if self.requests.len() >= REQUESTS_MAX || self.blocks > BLOCKS_MAX {
            return Err(TrafficError::TooLarge);
        }
        self.index.insert(request.id, self.requests.len());
        let arrived = Arrived {
            at,
            prompt_tokens: request.prompt_tokens().max(1),
            max_tokens: request.stop.max_tokens,
            choices: request.choice_count,
            lane: request.lane,
            keys: keys.cloned(),
            first_token: None,
            output_tokens: None,
        };
        self.requests.push((request.id, arrived));
        Ok(())
    }

    fn joined(&mut self, record: &NodeRecord) {
        let role = record.assigned_role();
        self.nodes.entry(record.id.name.clone()).or_insert(role);
        if role != AssignedRole::Prefill {
            self.capacity.get_or_insert(record.capacity);
        }
    }

    fn of(&mut self, request: RequestId) -> Option<&mut Arrived> {
        let index = *self.index.get(&request)?;
        self.requests.get_mut(index).map(|(_, arrived)| arrived)
    }

    fn first_token(&mut self, at: Time, key: AttemptKey) {
        if let Some(arrived) = self.of(key.request) {
            arrived.first_token.get_or_insert(at);
        }
    }

    fn note(&mut self, note: &Note) {
        let Note::Delivered { request, output_tokens } = note;
        if let Some(arrived) = self.of(*request) {
            arrived.output_tokens = Some(*output_tokens);
        }
    }

    fn into_traffic(
        mut self,
        (name, config): (String, ClusterConfig),
        ending: Ending,
    ) -> Result<Traffic, TrafficError> {
        let start = self
            .requests
            .first()
            .map(|(_, first)| first.at)
            .ok_or(TrafficError::NoRequests)?;
        let capacity = self.capacity.ok_or(TrafficError::NoDecodeNode)?;
        let too_long = self.leave_out_too_long(capacity.max_model_tokens)?;
        let block_tokens = capacity.block_tokens;
        let blocks = self.requests.iter().map(|(_, arrived)| arrived.blocks(block_tokens));
        if blocks.fold(0, usize::saturating_add) > BLOCKS_MAX {
            return Err(TrafficError::TooLarge);
        }
        let ttft = |arrived: &Arrived| Some(arrived.first_token?.since(arrived.at).as_secs_f64() * 1_000.0);
        let ttft_ms = self.requests.iter().filter_map(|(_, arrived)| ttft(arrived)).collect();
        let is_unknown = |(_, arrived): &&(RequestId, Arrived)| arrived.output_tokens.is_none();
        let of_unknown_length = self.requests.iter().filter(is_unknown).count();
        let planned = |(id, arrived): (RequestId, Arrived)| arrived.planned(id, (start, &capacity));
        let mut requests: Vec<TraceRequest> = self.requests.into_iter().map(planned).collect();
        // The loop's clock does not go back, but a file may say so.
        requests.sort_by_key(|request| request.at);
        let mut nodes: BTreeMap<AssignedRole, BTreeSet<NodeName>> = BTreeMap::new();
        for (name, role) in self.nodes {
            nodes.entry(role).or_default().insert(name);
        }
        Ok(Traffic {
            trace: Trace {
                name,
                block_tokens,
                requests,
            },
            nodes,
            capacity,
            config,
            ttft_ms,
            faults: self.faults,
            of_unknown_length,
            too_long,
            ending,
        })
    }

    /// A simulated node would refuse them as the real ones did, and one of them would forbid a simulation of all others. How many they are.
    fn leave_out_too_long(&mut self, max_model_tokens: u32) -> Result<usize, TrafficError> {
        let all = self.requests.len();
        self.requests
            .retain(|(_, arrived)| arrived.prompt_tokens < max_model_tokens);
        match self.requests.len() {
            0 => Err(TrafficError::AllTooLong { max_model_tokens }),
            left => Ok(all - left),
        }
    }
}

impl Arrived {
    fn planned(&self, id: RequestId, (start, capacity): (Time, &NodeCapacity)) -> TraceRequest {
        let longest = u64::from(self.max_tokens) * u64::from(self.choices.max(1));
        // The choices of a request run side by side; a trace knows one answer, as long as each of them.
        let output = self.output_tokens.unwrap_or(longest) / u64::from(self.choices.max(1));
        // A request that was turned away may have been allowed more than a node takes.
        let room = capacity.max_model_tokens.saturating_sub(self.prompt_tokens);
        let output = u32::try_from(output).unwrap_or(u32::MAX).min(room);
        TraceRequest {
            at: self.at.since(start),
            prompt_tokens: self.prompt_tokens,
            output_tokens: output.max(1),
            prefix_blocks: self.prefix_blocks(id, capacity.block_tokens),
            lane: self.lane,
            conversation: None,
        }
    }

    fn known_keys(&self, block_tokens: u32) -> &[PrefixKey] {
        self.keys.as_ref().map_or(&[], |keys| keys.of_blocks(block_tokens))
    }

    fn blocks(&self, block_tokens: u32) -> usize {
        match self.known_keys(block_tokens) {
            [] => 0,
            _ => block_count(self.prompt_tokens, block_tokens),
        }
    }

    /// Keys name whole blocks before the last token. What comes after them is like no other prompt's.
    fn prefix_blocks(&self, id: RequestId, block_tokens: u32) -> Vec<u64> {
        let known = self.known_keys(block_tokens);
        let blocks = self.blocks(block_tokens);
        let own = |block: usize| (id.0 as u64).rotate_left(17) ^ block as u64;
        (0..blocks)
            .map(|block| known.get(block).map_or_else(|| own(block), |PrefixKey(key)| *key))
            .collect()
    }
}

impl Traffic {
    pub fn node_count(&self, role: AssignedRole) -> u32 {
        let names = self.nodes.get(&role).map_or(0, BTreeSet::len);
        u32::try_from(names).unwrap_or(u32::MAX)
    }

    /// From the first arrival to the last one.
    pub fn span(&self) -> Duration {
        self.trace.requests.last().map_or(Duration::ZERO, |last| last.at)
    }
}

#[cfg(test)]
mod tests {
    use serving_core::request::Lane;

    use super::*;

    fn arrived(prompt_tokens: u32, output_tokens: Option<u64>) -> (RequestId, Arrived) {
        let arrived = Arrived {
            at: Time::from_millis(5),
            prompt_tokens,
            max_tokens: 16,
            choices: 1,
            lane: Lane::Interactive,
            keys: None,
            first_token: None,
            output_tokens,
        };
        (RequestId(prompt_tokens.into()), arrived)
    }

    fn traffic_of(requests: Vec<(RequestId, Arrived)>) -> Result<Traffic, TrafficError> {
        let collected = Collected {
            requests,
            capacity: Some(NodeCapacity {
                kv_blocks: 100,
                block_tokens: 16,
                max_sequences: 8,
                max_batch_tokens: 512,
                max_model_tokens: 1_024,
                block_bytes: 1_000,
            }),
            ..Collected::default()
        };
        collected.into_traffic(("test".to_owned(), ClusterConfig::default()), Ending::Cut)
    }

    #[test]
    fn a_prompt_that_no_node_takes_is_left_out_and_counted() {
        let all = vec![
            arrived(100, Some(5)),
            arrived(1_023, Some(9)),
            arrived(1_024, None),
            arrived(9_000, None),
        ];
        let traffic = traffic_of(all).expect("two requests are left");
        let lengths: Vec<(u32, u32)> = traffic
            .trace
            .requests
            .iter()
            .map(|request| (request.prompt_tokens, request.output_tokens))
            .collect();
        assert_eq!(lengths, [(100, 5), (1_023, 1)]);
        assert_eq!((traffic.too_long, traffic.of_unknown_length), (2, 0));
        let error = traffic_of(vec![arrived(9_000, None)]).expect_err("nothing is left");
        assert!(matches!(
            error,
            TrafficError::AllTooLong {
                max_model_tokens: 1_024
            }
        ));
    }
}
