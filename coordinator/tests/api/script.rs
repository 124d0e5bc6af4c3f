//! What the scripted control loop does with a request: events that a test writes, or that are made from the request.

use std::time::{Duration, Instant};

use coordinator::request_handle::{ClientEvent, Placement, Rejected, RequestSummary, TokenTimes};
use serving_core::ids::{Attempt, ChoiceIndex, NodeName, OutputIndex, TokenId};
use serving_core::request::{FinishReason, Request, TokenEvent, TokenLogprobs};
use serving_core::stage::{Stage, StageTimings};
use tokio::sync::oneshot;

use super::byte_model::END;

/// What the scripted loop does with one request.
pub enum Script {
    Reject(Rejected),
    Play(Vec<Step>),
}

pub enum Step {
    Event(ClientEvent),
    /// Waits until the test lets it go on.
    Wait(oneshot::Receiver<()>),
    /// Keeps the stream open until the edge drops it.
    Hang,
}

pub fn placed() -> Step {
    Step::Event(ClientEvent::Placed(Placement {
        attempt: Attempt(0),
        prefill_node: Some(NodeName::new("prefill-0")),
        decode_node: Some(NodeName::new("decode-0")),
        route_reason: "least_loaded".to_owned(),
        local_prefill: None,
        queued_for: Duration::from_millis(7),
    }))
}

/// One token; its logprobs, where asked for, are made from its id so that a test can foretell them.
/// `place`: choice and index.
pub fn token(request: &Request, place: (u32, u32), token: TokenId, finish: Option<FinishReason>) -> Step {
    let event = TokenEvent {
        choice: ChoiceIndex(place.0),
        index: OutputIndex(place.1),
        token,
        logprobs: request.logprobs.map(|k| logprobs(token, k)),
        finish,
    };
    Step::Event(ClientEvent::Token(event, TokenTimes::received(Instant::now())))
}

pub fn logprobs(token: TokenId, k: u32) -> TokenLogprobs {
    let top = (0..k)
        .map(|rank| (TokenId(b'a'.into()), rank))
        .map(|(a, rank)| (TokenId(a.0 + rank), -1.0 - rank as f32));
    TokenLogprobs {
        logprob: -(token.0 as f32) / 100.0,
        top: top.collect(),
    }
}

/// What a coordinator tells of a request before the nodes' last reports.
pub fn known() -> Step {
    Step::Event(ClientEvent::Known(Box::new(RequestSummary {
        timings: StageTimings(vec![(Stage::Queue, Duration::from_micros(10))]),
        cached_tokens: 3,
        attempts: 1,
        ..RequestSummary::default()
    })))
}

pub fn done() -> Step {
    let timings = StageTimings(vec![
        (Stage::Queue, Duration::from_micros(10)),
        (Stage::PrefillForward, Duration::from_micros(20)),
        (Stage::Decode, Duration::from_micros(30)),
    ]);
    Step::Event(ClientEvent::Done(Box::new(RequestSummary {
        timings,
        cached_tokens: 3,
        kv_bytes: 4096,
        transfer: Duration::from_micros(1500),
        transport: Some("grpc".to_owned()),
        kv_hashes: vec![0xab, 0x1_0000_0000],
        attempts: 1,
        ..RequestSummary::default()
    })))
}

/// Each choice says its text byte by byte and ends with the end token (or by length, when the budget is short).
pub fn say(request: &Request, text: impl Fn(u32) -> String) -> Vec<Step> {
    let mut steps = vec![placed()];
    if let Some(k) = request.prompt_logprobs {
        let tokens = request.prompt.iter().skip(1).map(|id| logprobs(*id, k)).collect();
        steps.push(Step::Event(ClientEvent::PromptLogprobs {
            first_position: 1,
            tokens,
        }));
    }
    let budget = request.stop.max_tokens;
    for choice in 0..request.choice_count {
        let mut tokens: Vec<TokenId> = text(choice).bytes().map(|byte| TokenId(u32::from(byte))).collect();
        tokens.push(END);
        for (index, id) in (0..budget).zip(tokens) {
            let finish = match id {
                END => Some(FinishReason::EndToken),
                _ if index + 1 == budget => Some(FinishReason::Length),
                _ => None,
            };
            steps.push(token(request, (choice, index), id, finish));
        }
    }
    steps.push(done());
    steps
}
