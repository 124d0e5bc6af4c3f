//! Where each prompt of a request with several prompts ran. To the control loop each prompt is a request with its own
//! nodes, attempts and stages. The record shows the prompt that the client heard of first, and lists all of them.

use std::borrow::Cow;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serving_core::ids::NodeName;

use super::shape::{StageShape, ms, stage_shapes};
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

/// The JSON of one prompt: `docs/reference/records.md`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PromptShape {
    pub choices: Vec<u32>,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub cached_tokens: u32,
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
    pub route_reason: Option<String>,
    pub local_prefill: Option<Cow<'static, str>>,
    pub attempts: u32,
    pub preemptions: u32,
    pub transport: Option<String>,
    pub kv_bytes: u64,
    pub kv_transfer_ms: Option<f64>,
    pub stages: Vec<StageShape>,
}

impl PromptRecord {
    pub fn shape(&self) -> PromptShape {
        let (placement, summary) = (self.placement.as_ref(), &self.summary);
        let name = |node: Option<&NodeName>| node.map(ToString::to_string);
        let prefill_node = name(placement.and_then(|p| p.prefill_node.as_ref()));
        let decode_node = name(placement.and_then(|p| p.decode_node.as_ref()));
        PromptShape {
            choices: self.choices.clone().collect(),
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            cached_tokens: summary.cached_tokens,
            stages: stage_shapes(&summary.timings, (prefill_node.as_deref(), decode_node.as_deref())),
            prefill_node,
            decode_node,
            route_reason: placement.map(|p| p.route_reason.clone()),
            local_prefill: placement
                .and_then(|p| p.local_prefill)
                .map(|reason| reason.name().into()),
            attempts: summary.attempts,
            preemptions: summary.preemptions,
            transport: summary.transport.clone(),
            kv_bytes: summary.kv_bytes,
            kv_transfer_ms: summary.transport.is_some().then(|| ms(summary.transfer)),
        }
    }
}

impl PromptShape {
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        [&self.prefill_node, &self.decode_node]
            .into_iter()
            .flatten()
            .map(String::as_str)
    }

    pub fn bytes(&self) -> usize {
        let texts = [
            &self.prefill_node,
            &self.decode_node,
            &self.route_reason,
            &self.transport,
        ];
        let texts: usize = texts.iter().filter_map(|text| text.as_ref()).map(String::len).sum();
        let stages: usize = self.stages.iter().map(StageShape::bytes).sum();
        size_of::<Self>() + size_of_val(self.choices.as_slice()) + texts + stages
    }
}

impl RequestSummary {
    /// The record of a request with several prompts: the times of `leading`, and the sums of all prompts.
    pub fn of_all<'a>(leading: &Self, all: impl Iterator<Item = &'a Self>) -> Self {
        let mut whole = Self {
            cached_tokens: 0,
            preemptions: 0,
            kv_bytes: 0,
            failed_legs: Vec::new(),
            ..leading.clone()
        };
        for one in all {
            whole.cached_tokens += one.cached_tokens;
            whole.preemptions += one.preemptions;
            whole.kv_bytes += one.kv_bytes;
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
            attempts: 2,
            kv_bytes: 100,
            transport: Some("grpc".to_owned()),
            failed_legs: vec!["decode:decode-0:transfer".to_owned()],
            ..RequestSummary::default()
        };
        let first = RequestSummary {
            cached_tokens: 32,
            preemptions: 1,
            attempts: 1,
            kv_bytes: 10,
            transport: Some("shm-direct".to_owned()),
            ..RequestSummary::default()
        };
        let whole = RequestSummary::of_all(&first, [&slow, &first].into_iter());
        let expected = RequestSummary {
            cached_tokens: 48,
            preemptions: 1,
            attempts: 2,
            kv_bytes: 110,
            failed_legs: slow.failed_legs.clone(),
            ..first.clone()
        };
        assert_eq!(whole, expected);
    }
}
