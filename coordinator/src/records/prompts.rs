//! Where each prompt of a request with several prompts ran. To the control loop each prompt is a request with its own
//! nodes, attempts and stages. The record shows the prompt that the client heard of first, and lists all of them.

use std::ops::Range;

use super::shape::{PromptShape, Serving, stage_shapes};
use crate::request_handle::{Placement, RequestSummary};

#[derive(Clone, Debug, Default)]
pub struct PromptRecord {
    /// Counted over all prompts, as in the answer.
    pub choices: Range<u32>,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub placement: Option<Placement>,
    pub summary: RequestSummary,
}

impl PromptRecord {
    pub fn shape(&self) -> PromptShape {
        let tokens = (self.prompt_tokens, self.output_tokens);
        let serving = Serving::of(self.placement.as_ref(), &self.summary, tokens);
        let nodes = (serving.prefill_node.as_deref(), serving.decode_node.as_deref());
        PromptShape {
            choices: self.choices.clone().collect(),
            stages: stage_shapes(&self.summary.timings, nodes),
            serving,
        }
    }
}

impl RequestSummary {
    /// The record of a request with several prompts: the times of `leading`, and the sums of all prompts.
    pub fn of_all<'a>(leading: &Self, all: impl Iterator<Item = &'a Self>) -> Self {
        let mut whole = Self {
            cached_tokens: 0,
            preemptions: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
            kv_bytes: 0,
            failed_legs: Vec::new(),
            ..leading.clone()
        };
        for one in all {
            // Nodes report these numbers, and a wrong one must not end the request.
            whole.cached_tokens = whole.cached_tokens.saturating_add(one.cached_tokens);
            whole.preemptions = whole.preemptions.saturating_add(one.preemptions);
            whole.drafted_tokens = whole.drafted_tokens.saturating_add(one.drafted_tokens);
            whole.accepted_tokens = whole.accepted_tokens.saturating_add(one.accepted_tokens);
            whole.kv_bytes = whole.kv_bytes.saturating_add(one.kv_bytes);
            whole.attempts = whole.attempts.max(one.attempts);
            whole.failed_legs.extend_from_slice(&one.failed_legs);
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_of_all_prompts_and_times_of_the_one_that_came_first() {
        let slow = RequestSummary {
            cached_tokens: 16,
            drafted_tokens: 5,
            accepted_tokens: 3,
            attempts: 2,
            kv_bytes: 100,
            transport: Some("grpc".to_owned()),
            failed_legs: vec!["decode:decode-0:transfer".to_owned()],
            ..RequestSummary::default()
        };
        let first = RequestSummary {
            cached_tokens: 32,
            preemptions: 1,
            drafted_tokens: 4,
            attempts: 1,
            kv_bytes: 10,
            transport: Some("shm-direct".to_owned()),
            ..RequestSummary::default()
        };
        let whole = RequestSummary::of_all(&first, [&slow, &first].into_iter());
        let expected = RequestSummary {
            cached_tokens: 48,
            preemptions: 1,
            drafted_tokens: 9,
            accepted_tokens: 3,
            attempts: 2,
            kv_bytes: 110,
            failed_legs: slow.failed_legs.clone(),
            ..first.clone()
        };
        assert_eq!(whole, expected);
    }

    #[test]
    fn counts_that_no_node_can_have_end_no_request() {
        let wrong = RequestSummary {
            cached_tokens: u32::MAX,
            preemptions: u32::MAX,
            kv_bytes: u64::MAX,
            ..RequestSummary::default()
        };
        assert_eq!(RequestSummary::of_all(&wrong, [&wrong, &wrong].into_iter()), wrong);
    }
}
