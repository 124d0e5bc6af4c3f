//! Long prompts that arrive while streams run: what the running streams feel of them is the question of disaggregation.

use std::time::Duration;

use super::{Length, ShapeError, request};
use crate::trace::{Trace, TraceRequest};

/// Streams start first, then long prompts come one by one. The streams must be long enough to outlive the last long prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interference {
    pub streams: u32,
    pub stream_prompt_tokens: u32,
    pub stream_output_tokens: u32,
    /// Time between the starts of two streams, so that their prompts do not meet.
    pub stream_every: Duration,
    pub long_prompts: u32,
    pub long_prompt_tokens: u32,
    pub long_output_tokens: u32,
    /// When the first long prompt comes.
    pub long_from: Duration,
    pub long_every: Duration,
}

impl Interference {
    pub fn trace(&self) -> Result<Trace, ShapeError> {
        for (what, tokens) in [
            ("the prompt of a stream", self.stream_prompt_tokens),
            ("the answer of a stream", self.stream_output_tokens),
            ("a long prompt", self.long_prompt_tokens),
            ("the answer to a long prompt", self.long_output_tokens),
        ] {
            Length::exactly(tokens).range(what)?;
        }
        if self.streams == 0 {
            return Err(ShapeError::Zero {
                what: "the number of streams",
            });
        }
        let streams = (0..self.streams).map(|index| TraceRequest {
            at: self.stream_every.saturating_mul(index),
            ..request(self.stream_prompt_tokens, self.stream_output_tokens)
        });
        let long = (0..self.long_prompts).map(|index| TraceRequest {
            at: self.long_from.saturating_add(self.long_every.saturating_mul(index)),
            ..request(self.long_prompt_tokens, self.long_output_tokens)
        });
        let mut requests: Vec<TraceRequest> = streams.chain(long).collect();
        requests.sort_by_key(|request| request.at);
        Ok(Trace {
            name: self.words(),
            block_tokens: 0,
            requests,
        })
    }

    /// Whether a request of the trace is one of the long prompts.
    pub fn is_long(&self, request: &TraceRequest) -> bool {
        request.prompt_tokens == self.long_prompt_tokens && request.output_tokens == self.long_output_tokens
    }

    fn words(&self) -> String {
        format!(
            "{} streams of {}/{} tokens, beside them {} prompts of {}/{} tokens, one every {} s",
            self.streams,
            self.stream_prompt_tokens,
            self.stream_output_tokens,
            self.long_prompts,
            self.long_prompt_tokens,
            self.long_output_tokens,
            self.long_every.as_secs_f64()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Interference = Interference {
        streams: 3,
        stream_prompt_tokens: 32,
        stream_output_tokens: 400,
        stream_every: Duration::from_millis(100),
        long_prompts: 2,
        long_prompt_tokens: 1_500,
        long_output_tokens: 4,
        long_from: Duration::from_secs(2),
        long_every: Duration::from_secs(3),
    };

    #[test]
    fn long_prompts_come_beside_running_streams() {
        let trace = SHAPE.trace().expect("the shape is possible");
        let seen = trace
            .requests
            .iter()
            .map(|request| (request.at.as_millis(), SHAPE.is_long(request)));
        let expected = [(0, false), (100, false), (200, false), (2_000, true), (5_000, true)];
        assert_eq!(seen.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_shape_without_streams_or_tokens_is_refused() {
        let refused = |shape: Interference| shape.trace().expect_err("it is impossible");
        assert!(matches!(
            refused(Interference { streams: 0, ..SHAPE }),
            ShapeError::Zero { .. }
        ));
        let empty = Interference {
            long_output_tokens: 0,
            ..SHAPE
        };
        assert!(matches!(refused(empty), ShapeError::Tokens { tokens: 0, .. }));
    }
}
