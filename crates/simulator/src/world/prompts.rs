//! The tokens of prompts and outputs: numbers that are equal where the trace says so. What they mean is of no interest here.

use std::sync::Arc;

use serving_core::ids::{RequestId, TokenId};
use serving_core::request::{Request, SamplingParams, StopConditions};
use workload::trace::Trace;

use crate::arithmetic::{keyed, mix};
use crate::scenario::Scenario;

/// Different for each seed, as a policy may draw from it.
fn id_of(seed: u64, index: usize) -> RequestId {
    let place = index as u64;
    RequestId(u128::from(keyed(seed, 1, place)) << 64 | u128::from(place))
}

/// An output token; the same wherever it is drawn.
pub(super) fn output_token(id: RequestId, index: u32, vocab_size: u32) -> TokenId {
    TokenId((mix((id.0 as u64) << 32 | u64::from(index)) % u64::from(vocab_size.max(1))) as u32)
}

/// Equal block ids give equal tokens; a prompt without ids is like no other.
fn prompt(trace: &Trace, index: usize, vocab_size: u32) -> Arc<[TokenId]> {
    let request = &trace.requests[index];
    let length = request.prompt_tokens.max(1) as usize;
    let vocab = u64::from(vocab_size.max(1));
    let block_tokens = match request.prefix_blocks.is_empty() {
        true => length,
        false => trace.block_tokens.max(1) as usize,
    };
    (0..length)
        .scan((usize::MAX, 0_u64), |(block, stream), position| {
            if *block != position / block_tokens {
                *block = position / block_tokens;
                *stream = match request.prefix_blocks.get(*block) {
                    Some(id) => mix(*id),
                    None => mix(keyed(u64::MAX, index as u64, *block as u64)),
                };
            }
            Some(TokenId((mix(*stream ^ position as u64) % vocab) as u32))
        })
        .collect()
}

pub(super) fn request(scenario: &Scenario, index: usize) -> Request {
    let (trace, nodes) = (&scenario.trace, &scenario.nodes);
    let planned = &trace.requests[index];
    let prompt = prompt(trace, index, nodes.limits.vocab_size);
    Request {
        id: id_of(scenario.seed, index),
        client_prompt_tokens: u32::try_from(prompt.len()).unwrap_or(u32::MAX),
        constraint: Default::default(),
        prompt,
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens: planned.output_tokens.max(1),
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: 1,
        seed: 0,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: planned.lane,
        time_limit: nodes.request_time_limit,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serving_core::request::Lane;
    use workload::trace::TraceRequest;

    use super::*;

    #[test]
    fn prompts_share_what_their_block_ids_share() {
        let planned = |prompt_tokens, prefix_blocks: &[u64]| TraceRequest {
            at: Duration::ZERO,
            prompt_tokens,
            output_tokens: 1,
            prefix_blocks: prefix_blocks.to_vec(),
            lane: Lane::Interactive,
            conversation: None,
        };
        let trace = Trace {
            name: "t".into(),
            block_tokens: 8,
            requests: vec![
                planned(20, &[1, 2, 3]),
                planned(20, &[1, 2, 4]),
                planned(20, &[]),
                planned(20, &[]),
            ],
        };
        let [a, b, c, d] = [0, 1, 2, 3].map(|index| prompt(&trace, index, 50_000));
        assert_eq!(a[..16], b[..16]);
        assert_ne!(a[16..], b[16..]);
        assert_ne!(c[..8], a[..8]);
        assert_ne!(c, d);
    }
}
