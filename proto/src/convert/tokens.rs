//! Token events with their logprobs and finish reasons.

use serving_core::ids::{ChoiceIndex, OutputIndex, TokenId};
use serving_core::request::{FinishReason, TokenEvent, TokenLogprobs};

use super::request::TOP_LOGPROBS_MAX;
use super::{ConvertError, LARGE_LIST_MAX, Result, at_most, unknown};
use crate::messages::PromptLogprobs;
use crate::v1;

pub(super) fn tokens_to_wire(tokens: Vec<TokenEvent>) -> Vec<v1::TokenEvent> {
    tokens.into_iter().map(Into::into).collect()
}

pub(super) fn tokens_from_wire(tokens: Vec<v1::TokenEvent>, field: &'static str) -> Result<Vec<TokenEvent>> {
    at_most(tokens, LARGE_LIST_MAX, field)?
        .into_iter()
        .map(TryInto::try_into)
        .collect()
}

impl From<TokenEvent> for v1::TokenEvent {
    fn from(event: TokenEvent) -> Self {
        Self {
            choice: event.choice.0,
            index: event.index.0,
            token: event.token.0,
            logprobs: event.logprobs.map(Into::into),
            finish: event.finish.map(finish_to_wire),
        }
    }
}

impl TryFrom<v1::TokenEvent> for TokenEvent {
    type Error = ConvertError;
    fn try_from(wire: v1::TokenEvent) -> Result<Self> {
        Ok(Self {
            choice: ChoiceIndex(wire.choice),
            index: OutputIndex(wire.index),
            token: TokenId(wire.token),
            logprobs: wire.logprobs.map(TryInto::try_into).transpose()?,
            finish: wire.finish.map(finish_from_wire).transpose()?,
        })
    }
}

/// Only the coordinator finds stop strings, so they have no wire form. The unspecified kind is sent, and refused on
/// arrival.
fn finish_to_wire(finish: FinishReason) -> v1::Finish {
    use v1::finish::Kind;
    let (kind, stop_token) = match finish {
        FinishReason::EndToken => (Kind::EndToken, 0),
        FinishReason::StopToken(token) => (Kind::StopToken, token.0),
        FinishReason::Length => (Kind::Length, 0),
        FinishReason::StopString => (Kind::Unspecified, 0),
    };
    v1::Finish {
        kind: kind.into(),
        stop_token,
    }
}

fn finish_from_wire(wire: v1::Finish) -> Result<FinishReason> {
    use v1::finish::Kind;
    match Kind::try_from(wire.kind) {
        Ok(Kind::EndToken) => Ok(FinishReason::EndToken),
        Ok(Kind::StopToken) => Ok(FinishReason::StopToken(TokenId(wire.stop_token))),
        Ok(Kind::Length) => Ok(FinishReason::Length),
        _ => Err(unknown("token.finish.kind", wire.kind)),
    }
}

impl From<TokenLogprobs> for v1::TokenLogprobs {
    fn from(logprobs: TokenLogprobs) -> Self {
        Self {
            logprob: logprobs.logprob,
            top: logprobs
                .top
                .into_iter()
                .map(|(token, logprob)| v1::TopLogprob {
                    token: token.0,
                    logprob,
                })
                .collect(),
        }
    }
}

impl TryFrom<v1::TokenLogprobs> for TokenLogprobs {
    type Error = ConvertError;
    fn try_from(wire: v1::TokenLogprobs) -> Result<Self> {
        Ok(Self {
            logprob: logprob(wire.logprob, "logprobs.logprob")?,
            top: at_most(wire.top, TOP_LOGPROBS_MAX as usize, "logprobs.top")?
                .into_iter()
                .map(|entry| Ok((TokenId(entry.token), logprob(entry.logprob, "logprobs.top")?)))
                .collect::<Result<_>>()?,
        })
    }
}

/// Minus infinity is a probability of zero and is allowed. A value a little above 0 comes from rounding.
fn logprob(value: f32, field: &'static str) -> Result<f32> {
    if value <= 1e-3 {
        return Ok(value);
    }
    Err(ConvertError::OutOfRange {
        field,
        value: value.to_string(),
        allowed: "0 and below",
    })
}

impl From<PromptLogprobs> for v1::PromptLogprobs {
    fn from(logprobs: PromptLogprobs) -> Self {
        Self {
            first_position: logprobs.first_position,
            tokens: logprobs.tokens.into_iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<v1::PromptLogprobs> for PromptLogprobs {
    type Error = ConvertError;
    fn try_from(wire: v1::PromptLogprobs) -> Result<Self> {
        Ok(Self {
            first_position: wire.first_position,
            tokens: at_most(wire.tokens, LARGE_LIST_MAX, "prompt_logprobs.tokens")?
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_>>()?,
        })
    }
}
