//! Tests of merging, of what a retry learns, and of slow readers.

use std::sync::Arc;

use service_runtime::metrics::config::MetricsConfig;
use serving_core::ids::{OutputIndex, RequestId};
use serving_core::request::{FinishReason, Lane, SamplingParams, StopConditions, TokenLogprobs};

use super::*;
use crate::slo::SloConfig;

impl From<Vec<TokenEvent>> for ReceivedTokens {
    fn from(tokens: Vec<TokenEvent>) -> Self {
        Self {
            tokens,
            ..Self::default()
        }
    }
}

pub(crate) fn request(choice_count: u32) -> Request {
    Request {
        id: RequestId(7),
        prompt: Arc::from([TokenId(1), TokenId(2)]),
        client_prompt_tokens: 2,
        constraint: Default::default(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens: 8,
            min_tokens: 0,
            end_tokens: vec![],
            stop_token_ids: vec![],
        },
        choice_count,
        seed: 0,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(9),
    }
}

fn key(attempt: u32) -> AttemptKey {
    AttemptKey {
        request: RequestId(7),
        attempt: Attempt(attempt),
    }
}

fn token(choice: u32, index: u32, id: u32) -> TokenEvent {
    TokenEvent {
        choice: ChoiceIndex(choice),
        index: OutputIndex(index),
        token: TokenId(id),
        logprobs: None,
        finish: None,
    }
}

fn last(mut token: TokenEvent) -> TokenEvent {
    token.finish = Some(FinishReason::Length);
    token
}

fn placed(choice_count: u32) -> (RequestStream, mpsc::Receiver<ClientEvent>) {
    placed_of(&request(choice_count))
}

fn placed_of(request: &Request) -> (RequestStream, mpsc::Receiver<ClientEvent>) {
    let (stream, receiver) = RequestStream::new(
        request,
        Instant::now(),
        Arc::new(Metrics::new("m", MetricsConfig::default(), &SloConfig::default())),
    );
    place(&stream, 0);
    (stream, receiver)
}

fn place(stream: &RequestStream, attempt: u32) {
    let facts = PlacementFacts {
        prefill: None,
        decode: None,
        local: None,
        route_reason: "test".into(),
        queued_for: Duration::ZERO,
    };
    stream.place(key(attempt), facts, Instant::now());
}

fn tokens(receiver: &mut mpsc::Receiver<ClientEvent>) -> Vec<(u32, u32, u32)> {
    let mut all = Vec::new();
    while let Ok(event) = receiver.try_recv() {
        if let ClientEvent::Token(t, _) = event {
            all.push((t.choice.0, t.index.0, t.token.0));
        }
    }
    all
}

fn delivered() -> Delivery {
    Delivery::Delivered { finished: vec![] }
}

#[test]
fn each_index_reaches_the_client_once_and_in_order_whichever_leg_brings_it() {
    let (stream, mut receiver) = placed(2);
    assert_eq!(
        stream.deliver(key(0), Leg::Prefill, vec![token(0, 0, 10), token(1, 0, 20)]),
        delivered()
    );
    assert_eq!(
        stream.deliver(key(0), Leg::Decode, vec![token(1, 0, 20), token(0, 0, 10)]),
        delivered()
    );
    assert_eq!(stream.deliver(key(0), Leg::Decode, vec![token(0, 2, 12)]), delivered());
    assert_eq!(
        stream.deliver(key(0), Leg::Decode, vec![token(0, 1, 11), token(1, 1, 21)]),
        delivered()
    );
    assert_eq!(
        tokens(&mut receiver),
        [(0, 0, 10), (1, 0, 20), (0, 1, 11), (0, 2, 12), (1, 1, 21)]
    );
    assert_eq!(stream.take_untold(), 5, "each is work of the owner once");
    assert_eq!(stream.take_untold(), 0);
}

#[test]
fn no_token_reaches_the_client_before_the_logprobs_of_the_whole_prompt() {
    let mut scored = request(1);
    scored.prompt_logprobs = Some(0);
    scored.client_prompt_tokens = 4;
    let (stream, mut receiver) = placed_of(&scored);
    let logprobs = |first_position, count| PromptLogprobs {
        first_position,
        tokens: vec![
            TokenLogprobs {
                logprob: -1.0,
                top: vec![],
            };
            count
        ],
    };
    assert_eq!(stream.prompt_logprobs(key(0), logprobs(1, 2)), delivered());
    assert_eq!(stream.deliver(key(0), Leg::Decode, vec![token(0, 0, 10)]), delivered());
    assert_eq!(stream.delivered_tokens(), 0);
    let ended = stream.end_attempt(Attempt(0));
    assert_eq!(
        (ended.token_count, ended.is_complete),
        (0, false),
        "the next attempt begins anew"
    );
    place(&stream, 1);
    let early = vec![token(0, 0, 10), last(token(0, 1, 11))];
    assert_eq!(stream.deliver(key(1), Leg::Decode, early), delivered());
    // Other chunks than the first attempt's: two positions are known.
    let rest = stream.prompt_logprobs(key(1), logprobs(1, 3));
    assert_eq!(
        rest,
        Delivery::Delivered {
            finished: vec![ChoiceIndex(0)]
        }
    );
    let mut seen = Vec::new();
    while let Ok(event) = receiver.try_recv() {
        match event {
            ClientEvent::PromptLogprobs { first_position, tokens } => seen.push((first_position, tokens.len())),
            ClientEvent::Token(token, _) => seen.push((token.token.0, 0)),
            _ => {}
        }
    }
    assert_eq!(seen, [(1, 2), (3, 1), (10, 0), (11, 0)]);
}

#[test]
fn two_different_first_tokens_are_a_violation() {
    let (stream, _receiver) = placed(1);
    stream.deliver(key(0), Leg::Prefill, vec![token(0, 0, 10)]);
    let second = stream.deliver(key(0), Leg::Decode, vec![token(0, 0, 11)]);
    assert!(matches!(second, Delivery::Violation(_)), "{second:?}");
}

#[test]
fn an_ended_attempt_tells_what_it_delivered_and_delivers_no_more() {
    let (stream, mut receiver) = placed(1);
    stream.deliver(key(0), Leg::Prefill, vec![token(0, 0, 10)]);
    stream.deliver(key(0), Leg::Decode, vec![token(0, 1, 11), token(0, 3, 13)]);
    let ended = stream.end_attempt(Attempt(0));
    assert_eq!(
        (ended.tokens, ended.token_count, ended.is_complete),
        (vec![TokenId(10), TokenId(11)], 2, false)
    );
    assert_eq!(
        stream.deliver(key(0), Leg::Decode, vec![token(0, 2, 12)]),
        Delivery::Stale
    );
    place(&stream, 1);
    // The early token of the old attempt is forgotten: the new one brings its own.
    assert_eq!(
        stream.deliver(key(1), Leg::Decode, vec![token(0, 2, 12), token(0, 3, 99)]),
        delivered()
    );
    assert_eq!(tokens(&mut receiver), [(0, 0, 10), (0, 1, 11), (0, 2, 12), (0, 3, 99)]);
    assert_eq!(stream.end_attempt(Attempt(1)).tokens, vec![TokenId(12), TokenId(99)]);
}

#[test]
fn the_end_of_each_choice_is_told() {
    let (stream, _receiver) = placed(2);
    let first = stream.deliver(key(0), Leg::Decode, vec![last(token(0, 0, 1)), token(1, 0, 2)]);
    assert_eq!(
        first,
        Delivery::Delivered {
            finished: vec![ChoiceIndex(0)]
        }
    );
    assert!(!stream.end_attempt(Attempt(0)).is_complete);
    place(&stream, 1);
    stream.deliver(key(1), Leg::Decode, vec![last(token(1, 1, 3))]);
    assert!(stream.end_attempt(Attempt(1)).is_complete);
}

#[test]
fn a_reader_that_is_too_far_behind_is_given_up_and_can_still_be_told() {
    let (stream, mut receiver) = placed(1);
    let mut broken = None;
    for index in 0..10_000 {
        match stream.deliver(key(0), Leg::Decode, vec![token(0, index, 5)]) {
            Delivery::Broken(error) => {
                broken = Some(error);
                break;
            }
            other => assert_eq!(other, delivered()),
        }
    }
    let Some(RequestError::SlowReader { behind_tokens, .. }) = broken else {
        panic!("never given up: {broken:?}");
    };
    assert!(behind_tokens as usize >= TOKENS_BEHIND_MAX, "{behind_tokens}");
    stream.fail(RequestError::SlowReader {
        behind_tokens,
        waited_ms: 0,
    });
    let mut end = None;
    while let Ok(event) = receiver.try_recv() {
        end = Some(event);
    }
    assert!(
        matches!(end, Some(ClientEvent::Failed(RequestError::SlowReader { .. }))),
        "{end:?}"
    );
}

#[test]
fn a_stream_that_has_lost_a_token_serves_no_other_attempt() {
    let (stream, mut receiver) = placed(1);
    let all: Vec<_> = (0..10_000).map(|index| token(0, index, 5)).collect();
    let given_up = stream.deliver(key(0), Leg::Decode, all);
    assert!(matches!(given_up, Delivery::Broken(_)), "{given_up:?}");
    // The leg ends before it can say so, and the client reads again.
    let had = stream.end_attempt(Attempt(0));
    assert_eq!(had.token_count, tokens(&mut receiver).len() as u64);
    place(&stream, 1);
    let next = u32::try_from(had.token_count).expect("some thousands");
    let again = stream.deliver(key(1), Leg::Decode, vec![token(0, next, 5)]);
    assert!(matches!(again, Delivery::Broken(_)), "{again:?}");
    assert!(!stream.end_attempt(Attempt(1)).is_complete);
}

#[test]
fn a_node_that_skips_tokens_is_found_out() {
    let (stream, _receiver) = placed(1);
    let gap: Vec<_> = (1..200).map(|i| token(0, i, 5)).collect();
    assert!(matches!(
        stream.deliver(key(0), Leg::Decode, gap),
        Delivery::Violation(_)
    ));
}

#[test]
fn the_prefill_node_says_what_was_cached_even_if_the_first_token_overtakes_it() {
    let (stream, mut receiver) = placed(1);
    stream.cached(Attempt(0), 0);
    stream.deliver(key(0), Leg::Decode, vec![token(0, 0, 10)]);
    stream.cached(Attempt(0), 32);
    stream.end_attempt(Attempt(0));
    // The next attempt's prompt has the delivered token, too.
    place(&stream, 1);
    stream.cached(Attempt(1), 48);
    stream.complete();
    let mut events = std::iter::from_fn(|| receiver.try_recv().ok());
    let told = events.find_map(|event| match event {
        ClientEvent::Done(summary) => Some(summary.cached_tokens),
        _ => None,
    });
    assert_eq!(told, Some(32));
}
